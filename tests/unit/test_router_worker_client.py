"""What goes out in a session."""

from __future__ import annotations

from pdcore.clock import ManualClock
from pdcore.types import RequestKey
from protos import membership_pb2, worker_pb2
from router.worker_client import RouterIdentity, SessionTiming, WorkerClient


def client() -> WorkerClient:
    made = WorkerClient(
        membership_pb2.WorkerDescription(worker_id="d0"),
        identity=RouterIdentity("r", "1", "m"),
        timing=SessionTiming(0.5, 3.0),
        listener=None,  # type: ignore[arg-type]  # nothing comes in
        clock=ManualClock(),
        max_message_bytes=1 << 20,
    )
    made.facts = object()  # type: ignore[assignment]  # connected
    return made


def order(command: worker_pb2.SessionCommand) -> object:
    if command.HasField("credits"):
        return [(c.request_id, c.attempt, c.tokens) for c in command.credits.credits]
    return command.WhichOneof("command")


def test_credits_share_a_message_and_pass_nothing_that_was_said_before_them() -> None:
    session = client()
    session.credit(RequestKey("a", 1), 16)
    session.credit(RequestKey("b", 2), 1)
    session.credit(RequestKey("a", 1), 3)
    session.send(worker_pb2.SessionCommand(abort=worker_pb2.Abort(request_id="a", attempt=1)))
    session.credit(RequestKey("b", 2), 16)
    assert [order(command) for command in session._outbox] == [
        [("a", 1, 16), ("b", 2, 1), ("a", 1, 3)],
        "abort",
        [("b", 2, 16)],
    ]


def test_without_a_session_nothing_is_kept_for_later() -> None:
    session = client()
    session.facts = None
    session.credit(RequestKey("a", 1), 16)
    assert not session._outbox
