"""What is wrong with files of the configuration is said before anything is started: no Ray, no worker, no router."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from cluster.config_file import load_config
from cluster.controller import ClusterController
from pdcore.errors import ConfigError
from tests.support.certificates import Authority
from tests.support.serve_process import ServeProcess

DIGEST = "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Paths by name: right and wrong files."""
    folder = tmp_path_factory.mktemp("files")
    authority = Authority(folder)
    found = {"ca": authority.ca_file, "missing": str(folder / "missing")}
    for name, dns in (("public", "localhost"), ("other", "localhost"), ("internal", "pdserve-internal")):
        found[f"{name}_cert"], found[f"{name}_key"] = authority.issue(name, dns)
    for name, text in (
        ("empty", ""),
        ("short", "0123456789\n"),
        ("good_keys", f"{DIGEST}: acme\n"),
        ("bad_keys", f"{DIGEST[1:]}: acme\n"),
    ):
        path = folder / name
        path.write_text(text)
        found[name] = str(path)
    return found


PUBLIC = "tls: {public: {cert_file: %s, key_file: %s}}"
INTERNAL = "tls: {internal: {cert_file: %s, key_file: %s, ca_file: %s}}"
KEYS = "router: {api_keys_file: %s}"
SECRET = "secret_file: %s"


@pytest.mark.parametrize(
    ("text", "names", "key", "words"),
    [
        (PUBLIC, "missing public_key", "tls.public.cert_file", "No such file"),
        (PUBLIC, "public_cert missing", "tls.public.key_file", "No such file"),
        (PUBLIC, "public_key public_cert", "tls.public.cert_file", "a PEM file"),
        (PUBLIC, "public_cert other_key", "tls.public.key_file", "the private key of the certificate in"),
        (INTERNAL, "internal_cert internal_key missing", "tls.internal.ca_file", "No such file"),
        (INTERNAL, "internal_cert other_key ca", "tls.internal.key_file", "the private key of the certificate in"),
        (INTERNAL, "public_cert public_key ca", "tls.internal.cert_file", "pdserve-internal"),
        (KEYS, "missing", "router.api_keys_file", "No such file"),
        (KEYS, "bad_keys", "router.api_keys_file", "64 hexadecimal digits"),
        (KEYS, "empty", "router.api_keys_file", "not an empty one"),
        (SECRET, "missing", "secret_file", "No such file"),
        (SECRET, "short", "secret_file", "16 to 512 printable"),
    ],
)
async def test_a_wrong_file_is_refused_before_anything_is_started(
    tmp_path: Path, files: Mapping[str, str], text: str, names: str, key: str, words: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text % tuple(files[name] for name in names.split()))
    assert yaml.safe_load(path.read_text())
    free = {"router.grpc_port": 0, "router.http_port": 0, "ray.address": "local"}
    told: list[str] = []
    controller = ClusterController(load_config(path, free), told.append)
    with pytest.raises(ConfigError) as refused:
        await controller.start()
    await controller.stop()
    assert refused.value.key == key
    assert words in str(refused.value)
    assert told == []


def test_serve_says_so_and_ends(tmp_path: Path, files: Mapping[str, str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(PUBLIC % (files["public_cert"], files["other_key"]) + f"\n{KEYS % files['good_keys']}\n")
    serve = ServeProcess("--config", str(path), "--grpc-port", "0", "--http-port", "0", "--ray-address", "local")
    try:
        assert serve.wait(60.0) == 2
    finally:
        serve.stop()
    assert "tls.public.key_file" in serve.output
    assert "Ray" not in serve.output
    assert "resolving model" not in serve.output
    assert "Traceback" not in serve.output
