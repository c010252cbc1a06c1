"""How a worker ends, and what must not be lost or left behind when it does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decode_worker.handler import ticket_owner
from decode_worker.worker import DecodeWorker
from pdcore.errors import PdserveError
from pdcore.types import RequestKey, Role
from prefill_worker.worker import PrefillWorker
from tests.support.processes import eventually, worker_config
from tests.support.session_client import SessionClient
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama
from worker.outbox import Outbox


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@contextmanager
def decode_worker(model: Path) -> Iterator[DecodeWorker]:
    worker = DecodeWorker(worker_config(model, Role.DECODE))
    try:
        worker.start()
        yield worker
    finally:
        worker.stop()


def test_a_drain_ends_only_when_the_last_tokens_are_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    gate.set()
    wait = Outbox.wait

    def gated(outbox: Outbox, timeout_s: float) -> bool:
        gate.wait(30.0)  # a stream that its router reads slowly
        return wait(outbox, timeout_s)

    monkeypatch.setattr(Outbox, "wait", gated)
    with decode_worker(model) as worker, SessionClient(worker.address, "r") as session:
        spec = spec_of(prompt_of(20), max_tokens=60)
        session.generate(spec)
        session.wait(lambda: session.tokens_of(spec.key.request_id), 10.0, "a first token")
        gate.clear()
        eventually(lambda: not worker.runtime.handler.held(), 10.0, "the engine is done with the request")
        assert not worker.drain(0.5), "nobody has been told of the last tokens"
        gate.set()
        assert worker.drain(5.0)
        assert len(session.wait_finished(spec.key.request_id, 5.0)) == 60


def test_a_revocation_that_comes_while_a_ticket_is_granted_finds_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with decode_worker(model) as worker, SessionClient(worker.address, "r") as session:
        handler = worker.runtime.handler
        receiver = handler.receiver  # type: ignore[attr-defined]
        grant = receiver.grant
        revokers: list[threading.Thread] = []

        def slow_grant(key: RequestKey, *arguments: object, **named: object) -> object:
            revokers.append(threading.Thread(target=handler.revoke, args=(ticket_owner(key),)))
            revokers[0].start()
            revokers[0].join(0.3)
            return grant(key, *arguments, **named)

        monkeypatch.setattr(receiver, "grant", slow_grant)
        spec = spec_of(prompt_of(60))
        session.reserve(spec)
        session.wait(lambda: session.failure_of(spec.key.request_id), 5.0, "the revocation is told")
        failure = session.failure_of(spec.key.request_id)
        assert failure is not None
        assert "revoked" in failure.message
        revokers[0].join(5.0)
        eventually(lambda: worker.runtime.load().reserved_blocks == 0, 5.0, "its blocks are free")


def test_a_dead_housekeeper_is_a_failed_decode_worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with decode_worker(model) as worker:
        table = worker.runtime.handler.receiver._desk.table  # type: ignore[attr-defined]

        def broken(now: float) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(table, "tick", broken)
        assert worker.failed.wait(5.0)
        assert "kv-housekeeper" in worker.problem


def test_a_dead_pump_is_a_failed_prefill_worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = PrefillWorker(worker_config(model, Role.PREFILL))
    try:
        worker.start()
        sender = worker.runtime.handler._sender  # type: ignore[attr-defined]

        def broken() -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(sender, "_watch", broken)
        assert worker.failed.wait(5.0)
        assert "kv-send" in worker.problem
    finally:
        worker.stop()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_start_that_fails_late_leaves_nothing(model: Path, role: Role) -> None:
    """The model is loaded and the port is served when it turns out that nobody answers for the cluster."""
    before = {thread.name for thread in threading.enumerate()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody can answer there
        config = replace(worker_config(model, role), controller=f"127.0.0.1:{taken.getsockname()[1]}")
        worker = PrefillWorker(config) if role is Role.PREFILL else DecodeWorker(config)
        with pytest.raises(PdserveError, match="no answer from the controller"):
            worker.runtime.start(register_timeout_s=0.5)
    port = int(worker.address.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1.0):
        pass
    left = {"kv-send", "kv-receive-0", "kv-housekeeper", "engine-loop", "registration", "session-watchdog"}
    eventually(
        lambda: not left & ({thread.name for thread in threading.enumerate()} - before), 5.0, "its threads have ended"
    )
    worker.stop()  # once more changes nothing
