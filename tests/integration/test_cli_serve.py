"""``python -m cluster serve`` before there is a cluster: told to end while it still waits for its model."""

from __future__ import annotations

import fcntl
import signal
import socket
from pathlib import Path

import pytest
from ray._private import services

from cluster.config_file import load_config
from cluster.ray_session import RaySession
from engine.model_store import resolve_model
from pdcore.errors import PdserveError
from tests.support.serve_process import ServeProcess
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import tiny_llama


def test_sigterm_ends_serve_while_another_process_converts_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(source)).path
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        serve = ServeProcess("--model", str(source), "--grpc-port", "0", "--http-port", "0", "--ray-address", "local")
        try:
            serve.wait_for("waiting for another process", 60)
            serve.signal(signal.SIGTERM)
            assert serve.wait(30.0) == 130  # not after the lock's own bound, a quarter of an hour
        finally:
            serve.stop()
    assert "interrupted before the cluster was ready" in serve.output
    assert "Ray" not in serve.output
    assert "Traceback" not in serve.output


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port"])
def test_a_taken_port_is_named_before_anything_is_started(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = {"--grpc-port": "--http-port", "--http-port": "--grpc-port"}[flag]
        serve = ServeProcess(flag, str(port), other, "0", "--ray-address", "local")
        try:
            assert serve.wait(60.0) == 2
        finally:
            serve.stop()
    assert f"127.0.0.1:{port}" in serve.output
    assert f"take another by {flag}" in serve.output
    assert "in use" in serve.output
    assert "Ray" not in serve.output
    assert "Traceback" not in serve.output


def test_an_address_without_a_ray_is_named_at_once(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        serve = ServeProcess("--model", str(model), "--grpc-port", "0", "--http-port", "0", "--ray-address", address)
        try:
            assert serve.wait(60.0) == 1
        finally:
            serve.stop()
    assert f"no Ray at '{address}'" in serve.output
    assert "Traceback" not in serve.output


def test_a_ray_that_does_not_answer_cannot_keep_serve_from_ending(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()  # connections are taken by the kernel, and nobody ever says a word
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        serve = ServeProcess(
            "--model", str(model), "--grpc-port", "0", "--http-port", "0", "--ray-address", address,
            shorter={"_SIGN_OF_LIFE_S": 1.0, "_LEAVE_RAY_S": 1.0},
        )  # fmt: skip
        try:
            serve.wait_for("joining Ray", 60)
            serve.wait_for("waiting for Ray", 30)
            serve.signal(signal.SIGTERM)
            assert serve.wait(50.0) == 130
        finally:
            serve.stop()
    assert "Traceback" not in serve.output


def test_a_ray_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "tiny")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        serve = ServeProcess(
            "--model", str(model), "--grpc-port", "0", "--http-port", "0", "--ray-address", "auto",
            shorter={"_SIGN_OF_LIFE_S": 1.0, "_JOIN_RAY_S": 2.0},
        )  # fmt: skip
        try:
            assert serve.wait(60.0) == 1
        finally:
            serve.stop()
    assert f"no Ray at '{address}', which $RAY_ADDRESS names: no answer within 2 s" in serve.output
    assert "Traceback" not in serve.output


def test_a_file_of_a_ray_that_has_ended_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves it behind when it is killed."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", set)  # whatever else runs on this machine
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        file.write_text(address)
        with pytest.raises(PdserveError) as refused:
            RaySession.open(load_config(None, {"ray.address": "auto"}), log_to_driver=False)
    for words in (f"no Ray at '{address}', which {file} names", "refused", "`ray stop`", "--ray-address local"):
        assert words in str(refused.value)
