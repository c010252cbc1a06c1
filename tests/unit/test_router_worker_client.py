"""What goes out in a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest

from pdcore.clock import ManualClock
from pdcore.config import RouterConfig
from pdcore.types import RequestKey
from protos import membership_pb2, worker_pb2
from router.worker_client import RouterIdentity, SessionTiming, WorkerClient
from router.worker_pool import MAX_CREDIT_WAIT_S, WorkerPool, credit_wait_s


def client(credit_wait_s: float = 0.0) -> WorkerClient:
    made = WorkerClient(
        membership_pb2.WorkerDescription(worker_id="d0"),
        identity=RouterIdentity("r", "1", "m"),
        timing=SessionTiming(60.0, 60.0, credit_wait_s),
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


async def test_credits_share_a_message_and_pass_nothing_that_was_said_before_them() -> None:
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


async def test_without_a_session_nothing_is_kept_for_later() -> None:
    session = client()
    session.facts = None
    session.credit(RequestKey("a", 1), 16)
    assert not session._outbox


class Written:
    """The call's side that takes commands."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[object] = asyncio.Queue()

    async def write(self, command: worker_pb2.SessionCommand) -> None:
        self.orders.put_nowait(order(command))

    async def next(self) -> object:
        async with asyncio.timeout(10):
            return await self.orders.get()


@asynccontextmanager
async def writing(session: WorkerClient) -> AsyncIterator[Written]:
    """The session writes; its first heartbeat is out."""
    written = Written()
    task = asyncio.create_task(session._write(written))  # type: ignore[arg-type]  # all that it needs
    try:
        assert await written.next() == "heartbeat"
        yield written
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_credits_go_out_after_a_while_with_those_that_came_meanwhile() -> None:
    session = client(credit_wait_s=0.01)
    async with writing(session) as written:
        session.credit(RequestKey("a", 1), 16)
        session.credit(RequestKey("b", 1), 16)
        assert await written.next() == [("a", 1, 16), ("b", 1, 16)]
        session.credit(RequestKey("c", 1), 16)
        assert await written.next() == [("c", 1, 16)]


async def test_whatever_else_is_said_takes_waiting_credits_along() -> None:
    session = client(credit_wait_s=60.0)
    async with writing(session) as written:
        session.credit(RequestKey("a", 1), 16)
        for _ in range(10):
            await asyncio.sleep(0)
        assert written.orders.empty()
        session.send(worker_pb2.SessionCommand(abort=worker_pb2.Abort(request_id="b", attempt=1)))
        assert await written.next() == [("a", 1, 16)]
        assert await written.next() == "abort"


async def test_nothing_of_a_session_that_has_ended_is_said_in_the_next_one() -> None:
    session = client(credit_wait_s=0.01)
    session._listener = Mock()
    session.credit(RequestKey("a", 1), 16)
    session.send(worker_pb2.SessionCommand(abort=worker_pb2.Abort(request_id="b", attempt=1)))
    session._lost("gone")
    session.facts = object()  # type: ignore[assignment]  # connected again
    async with writing(session) as written:
        await asyncio.sleep(0.05)  # the credit's timer is still that of the old session
        assert written.orders.empty()


@pytest.mark.parametrize("window", [1, 4, 64, 10_000])
def test_a_window_lasts_while_its_credits_wait(window: int) -> None:
    wait_s = credit_wait_s(window)
    assert 0 < wait_s <= MAX_CREDIT_WAIT_S
    assert wait_s * 5000 <= window - window / 4


def test_the_pool_s_sessions_wait_as_the_token_window_allows() -> None:
    config = RouterConfig("router", "", "null", "", token_window=16)
    pool = WorkerPool(config, "1", Mock(), ManualClock(), lambda: None)
    assert pool._timing.credit_wait_s == credit_wait_s(16) > 0
