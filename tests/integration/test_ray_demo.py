"""``python -m cluster demo`` as a process: three requests over the wire, the data file, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import REPOSITORY

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(300)]

MARK = "PDSERVE_TEST_RUN"  # inherited by every process of the demonstration, wherever it hangs in the tree
KEYS = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "text": str,
    "ttft_ms": float,
    "tpot_ms": float,
    "finish_reason": str,
    "prefill_worker": str,
    "decode_worker": str,
    "kv": dict,
}
KV_KEYS = {"blocks": int, "raw_bytes": int, "wire_bytes": int, "codec": str, "transport": str, "seconds": float}
KV_KEYS |= {"codec_reason": str}


def marked(run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == run:
                found.append(process)
        except psutil.Error:
            pass  # gone, or somebody else's
    return found


@pytest.fixture
def run() -> Iterator[str]:
    """The mark of this run; its processes are ended after the test, whatever happened."""
    name = uuid.uuid4().hex
    yield name
    for process in marked(name):
        process.kill()


def types(data: dict[str, object]) -> dict[str, type]:
    return {key: type(value) for key, value in data.items()}


def test_demo_sends_kv_and_leaves_nothing_behind(tmp_path: Path, demo_model: Path, run: str) -> None:
    path, log = tmp_path / "demo.json", tmp_path / "demo.log"
    with log.open("w") as output:  # a file, so that a process left behind could not keep a pipe open
        done = subprocess.run(
            [sys.executable, "-m", "cluster", "demo", "--json", str(path)],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", MARK: run},
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, log.read_text()
    _, alive = psutil.wait_procs(marked(run), timeout=20)
    assert not alive

    requests = json.loads(path.read_text())["requests"]
    assert len(requests) == 3
    for request in requests:
        assert types(request) == KEYS
        kv = request["kv"]
        assert types(kv) == KV_KEYS
        assert (request["prefill_worker"], request["decode_worker"]) == ("prefill-0", "decode-0")
        assert 0 < kv["wire_bytes"] < kv["raw_bytes"]
        # All but the block or two with which every chat begins: those the decode worker has from the first one.
        assert (kv["blocks"] + 2) * 16 >= request["prompt_tokens"] > 0
        assert kv["codec"]
        assert kv["transport"]
        assert kv["seconds"] > 0
        assert request["finish_reason"] in ("stop", "length")
        assert request["completion_tokens"] > 1
        assert request["text"].strip()
        assert request["ttft_ms"] > 0
        assert request["tpot_ms"] > 0
