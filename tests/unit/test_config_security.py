"""What the configuration says of certificates, the secret and addresses, and what of it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config_file import load_config, to_yaml
from pdcore.config import EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from pdcore.config_json import from_json, to_json
from pdcore.errors import ConfigError
from pdcore.security import ClientTls, InternalSecurity, InternalTls, PublicTls, is_loopback
from pdcore.types import Role
from security.secret import new_secret, read_secret, with_secret_of

TLS = InternalTls("i.crt", "i.key", "ca.crt")


def refused(tmp_path: Path, text: str) -> ConfigError:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    return error.value


def router(**options: object) -> RouterConfig:
    return RouterConfig("r", "/m", "m", "127.0.0.1:1", **options)  # type: ignore[arg-type]


def worker(**options: object) -> WorkerConfig:
    return WorkerConfig("d0", Role.DECODE, EngineConfig("/m", "m"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    router(host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "fe80::1%lo", "node-7", "localhost.example"])
def test_nothing_listens_in_plain_text_where_others_can_reach_it(host: str, tmp_path: Path) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"tls.public.*router.allow_insecure_listen: true.*--insecure"):
        router(host=host)
    with pytest.raises(ConfigError, match=r"tls.internal.*ray.allow_insecure_listen: true"):
        worker(host=host)
    assert refused(tmp_path, f"router: {{host: '{host}'}}").key == "router.host"
    assert refused(tmp_path, f"ray: {{worker_host: '{host}'}}").key == "ray.worker_host"
    # One of the two is not enough for the other.
    with pytest.raises(ConfigError):
        router(host=host, security=InternalSecurity(TLS, allow_insecure_listen=True))
    router(host=host, tls=PublicTls("a", "b"))
    router(host=host, allow_insecure_listen=True)
    worker(host=host, security=InternalSecurity(TLS))
    worker(host=host, security=InternalSecurity(allow_insecure_listen=True))


def test_files_reach_routers_and_workers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "tls:\n  public: {cert_file: p.crt, key_file: p.key, client_ca_file: c.crt}\n"
        "  internal: {cert_file: i.crt, key_file: i.key, ca_file: ca.crt}\n"
        "secret_file: s\nrouter: {host: 0.0.0.0, max_prompt_bytes: 1MiB, max_metadata_bytes: 2KiB, "
        "max_streams_per_connection: 3, max_connections: 4, max_calls: 5, log_level: error,\n  log_prompts: true}\n"
        "ray: {worker_host: 10.0.0.1}\n"
        "transfer: {transport: collective, allow_plaintext_kv: true}\n"
        "prefill: {num_blocks: 1}\ndecode: {num_blocks: 1}\n"
    )
    config = load_config(path)
    assert load_config_text(tmp_path, to_yaml(config, explain=True)) == config
    made = config.router_config(model_path=tmp_path, served_name="m", controller="c")
    assert made.tls == PublicTls("p.crt", "p.key", "c.crt")
    assert made.security == InternalSecurity(TLS, "s")
    assert (made.max_prompt_bytes, made.max_metadata_bytes) == (1 << 20, 2048)
    assert (made.max_streams_per_connection, made.max_connections, made.max_calls) == (3, 4, 5)
    assert (made.log_level, made.log_prompts) == ("error", True)
    assert not load_config(None).router_config(model_path=tmp_path, served_name="m", controller="c").log_prompts
    workers = config.worker_configs(model_path=tmp_path, served_name="m", controller="c", host="10.0.0.1", cores=None)
    assert {w.security for w in workers} == {InternalSecurity(TLS, "s")}
    assert not any(w.encrypted_kv for w in workers)


def test_the_explanation_says_from_where_relative_paths_are() -> None:
    lines = [line.strip() for line in to_yaml(load_config(None), explain=True).splitlines()]
    for key in ("api_keys_file: ''", "cert_file: ''", "secret_file: ''"):
        assert "relative path" in lines[lines.index(key) - 1].lower(), key


def load_config_text(tmp_path: Path, text: str) -> object:
    path = tmp_path / "again.yaml"
    path.write_text(text)
    return load_config(path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("tls: {public: {cert_file: a}}", "tls.public.key_file"),
        ("tls: {public: {client_ca_file: a}}", "tls.public.cert_file"),
        ("tls: {internal: {cert_file: a, key_file: b}}", "tls.internal.ca_file"),
        ("tls: {internal: {ca_file: a}}", "tls.internal.cert_file"),
        ("router: {max_metadata_bytes: 1023}", "router.max_metadata_bytes"),
    ],
)
def test_half_of_it_is_refused(tmp_path: Path, text: str, key: str) -> None:
    assert refused(tmp_path, text).key == key


@pytest.mark.parametrize("transport", ["collective", "nixl"])
def test_kv_in_plain_text_must_be_allowed(tmp_path: Path, transport: str) -> None:
    files = "tls: {internal: {cert_file: a, key_file: b, ca_file: c}}\n"
    error = refused(tmp_path, f"{files}transfer: {{transport: {transport}}}")
    assert error.key == "transfer.transport"
    assert "allow_plaintext_kv" in str(error)
    assert load_config_text(tmp_path, f"transfer: {{transport: {transport}}}")
    with pytest.raises(ConfigError, match="allow_plaintext_kv"):
        worker(security=InternalSecurity(TLS), transfer=TransferConfig(transport=transport))


def test_client_files_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match="key_file"):
        ClientTls(cert_file="a")


def test_where_the_secret_is_from(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from the file, 16 at least\n")
    of_file = InternalSecurity(secret_file=str(path))
    assert read_secret(of_file) == "from the file, 16 at least"
    environment = {"PDSERVE_CLUSTER_SECRET": "from the environment\n"}
    assert read_secret(with_secret_of(InternalSecurity(), environment)) == "from the environment"
    assert with_secret_of(of_file, environment) == of_file
    assert read_secret(replace(of_file, secret="handed over all the way")) == "handed over all the way"
    assert read_secret(InternalSecurity()) == ""
    assert new_secret() != new_secret()
    assert read_secret(InternalSecurity(secret=new_secret()))


@pytest.mark.parametrize("secret", ["too short", "x" * 513, "ä" * 20, "one line\nand another", ""])
def test_no_secrets(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "secret"
    path.write_text(secret)
    with pytest.raises(ConfigError, match="openssl rand") as error:
        read_secret(InternalSecurity(secret_file=str(path)))
    assert not secret or secret not in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(InternalSecurity(secret_file=str(tmp_path / "none")))


def test_the_secret_is_not_shown_but_handed_over() -> None:
    config = router(security=InternalSecurity(TLS, secret="a long and secret one"))
    assert "a long and secret one" not in repr(config)
    assert from_json(RouterConfig, to_json(config)) == config
    assert "a long and secret one" not in repr(worker(security=config.security))
