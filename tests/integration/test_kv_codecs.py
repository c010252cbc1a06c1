"""Codecs as a client sees them, on a real pair of worker processes: asked for, refused, chosen, and told."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from pdcore.config import KvCodecByClass, TransferConfig
from pdcore.errors import InvalidRequest
from pdcore.types import Role
from router.client import Client, Sampling
from tests.support.codec_reasons import codecs_of
from tests.support.local_cluster import LocalCluster
from tests.support.processes import worker_config
from tests.support.tiny_model import tiny_llama

PROMPT = [(7 * i) % 250 + 1 for i in range(150)]
SAMPLING = Sampling(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    configs = [
        worker_config(model, role, dtype="bfloat16", transfer=TransferConfig(frame_bytes=16384), prefix_cache=False)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    by_class = KvCodecByClass(batch="zstd")
    folder = tmp_path_factory.mktemp("cluster")
    with LocalCluster(model, folder, configs, forked=True, kv_codec_by_class=by_class) as cluster:
        yield cluster


def test_the_client_chooses_per_request(cluster: LocalCluster) -> None:
    tokens = set()
    with Client(cluster.address) as client:
        for codec in ("raw", "zstd", "bexp-zstd"):
            answer = client.complete(PROMPT, SAMPLING, kv_codec=codec)
            kv = answer.end.timeline.kv
            assert (kv.codec, kv.codec_reason, kv.lossless) == (codec, "asked for by the request or its class", True)
            assert (kv.wire_bytes < kv.raw_bytes) == (codec != "raw")
            tokens.add(answer.token_ids)
        assert len(tokens) == 1


def test_auto_tells_its_reason(cluster: LocalCluster) -> None:
    with Client(cluster.address) as client:
        for fields in ({}, {"kv_codec": "auto"}, {"kv_codec": "auto", "priority": "batch"}):
            kv = client.complete(PROMPT, SAMPLING, **fields).end.timeline.kv
            assert kv.codec in codecs_of(kv.codec_reason)
            assert kv.lossless


def test_a_class_has_a_codec_of_its_own(cluster: LocalCluster) -> None:
    with Client(cluster.address) as client:
        kv = client.complete(PROMPT, SAMPLING, priority="batch").end.timeline.kv
        assert (kv.codec, kv.codec_reason) == ("zstd", "asked for by the request or its class")
        kv = client.complete(PROMPT, SAMPLING, priority="batch", kv_codec="raw").end.timeline.kv
        assert kv.codec == "raw"
        kv = client.complete(PROMPT, SAMPLING, priority="interactive").end.timeline.kv
        assert kv.codec in codecs_of(kv.codec_reason)


def test_an_unknown_codec_is_refused_with_what_is_allowed(cluster: LocalCluster) -> None:
    with Client(cluster.address) as client:
        with pytest.raises(
            InvalidRequest, match=r"kv_codec: must be one of auto, raw, zstd, .*, got 'gzip'"
        ) as refused:
            client.complete(PROMPT, SAMPLING, kv_codec="gzip")
        assert refused.value.field == "kv_codec"
        # Known to the world, and to no worker here: nothing would be compressed that way.
        with pytest.raises(InvalidRequest, match="got 'tc4'"):
            client.complete(PROMPT, SAMPLING, kv_codec="tc4")


def pdserve(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="pdserve")
    return result.exit_code, result.stdout, result.stderr


def test_on_the_command_line(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = " ".join(map(str, PROMPT))
    base = ("generate", "--token-ids", ids, "--max-tokens", "4", "--address", cluster.address, "--timeline")
    for codec in ("raw", "bexp-zstd"):
        code, _, err = pdserve(*base, "--kv-codec", codec)
        assert code == 0, err
        assert f"KV by {codec}: asked for" in err
    code, _, err = pdserve(*base)
    assert code == 0, err
    assert " leaves " in " ".join(err.split())
    code, out, err = pdserve(*base, "--kv-codec", "gzip")
    assert (code, out) == (2, "")
    assert "--kv-codec: must be one of auto, raw" in err


def test_status_shows_native_code_and_transports(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_transfer.native.library import native_status

    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = pdserve("status", "--json", "--address", cluster.address)
    assert code == 0, err
    workers = json.loads(out)["workers"]
    assert len(workers) == 2
    for worker in workers:
        assert worker["worker"]["native_code"] == native_status()
        assert {"grpc", "shm"} <= set(worker["worker"]["transports"])
    code, out, err = pdserve("status", "--address", cluster.address)
    assert code == 0, err
    assert native_status().partition(":")[0] in out
    assert "KV transports: " in out
    assert max(map(len, out.splitlines())) <= 80
