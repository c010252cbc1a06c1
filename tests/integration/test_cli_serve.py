"""``python -m cluster serve`` before there is a cluster: told to end while it still waits for its model."""

from __future__ import annotations

import fcntl
import signal
from pathlib import Path

import pytest

from engine.model_store import resolve_model
from tests.support.serve_process import ServeProcess
from tests.support.tiny_gguf import write_tiny_gguf


def test_sigterm_ends_serve_while_another_process_converts_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(source)).path
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        serve = ServeProcess("--model", str(source), "--grpc-port", "0", "--ray-address", "local")
        try:
            serve.wait_for("waiting for another process", 60)
            serve.signal(signal.SIGTERM)
            assert serve.wait(30.0) == 130  # not after the lock's own bound, a quarter of an hour
        finally:
            serve.stop()
    assert "interrupted before the cluster was ready" in serve.output
    assert "Ray" not in serve.output
    assert "Traceback" not in serve.output
