"""When streams are put together, and that an idle one never waits for it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.clock import MonotonicClock
from pdcore.types import FinishReason, PriorityClass
from router.calls import Call, Calls
from router.effects import Outcome
from router.load_meter import LOOK_EVERY_S, Pacer, wanted_s
from router.metrics import CallMetrics
from router.pacing import BUSY, IDLE, MAX_INTERVAL_S, next_interval, pause
from router.stream import Chunk, RequestStream, Terminal
from router.text import TextStream
from router.tracker import Timeline
from router.turns import Turns

SHARES = st.floats(0.0, 4.0)


@given(st.lists(SHARES, max_size=50))
def test_the_interval_is_bounded_and_nothing_while_the_router_is_idle(shares: list[float]) -> None:
    interval = 0.0
    for share in shares:
        longer = next_interval(interval, share)
        assert 0.0 <= longer <= MAX_INTERVAL_S
        assert (longer > interval) == (share > BUSY and interval < MAX_INTERVAL_S)
        assert share >= IDLE or longer <= interval / 2
        interval = longer
    for _ in range(10):
        interval = next_interval(interval, 0.0)
    assert interval == 0.0


@pytest.mark.parametrize("tokens_per_s", [1_000, 8_000, 20_000, 40_000])
def test_it_settles_where_the_router_has_time_left(tokens_per_s: int) -> None:
    """A router to which a token costs 8 us and a message 80 us, and that has 256 streams."""
    interval, seen = 0.0, []
    for _ in range(40):
        messages_per_s = min(tokens_per_s, 256 / interval if interval else math.inf)
        busy = min(1.0, 8e-6 * tokens_per_s + 80e-6 * messages_per_s)
        seen.append(interval)
        interval = next_interval(interval, busy)
    assert set(seen[-10:]) == {interval}  # it does not swing
    assert busy <= max(BUSY, 8e-6 * tokens_per_s + 80e-6 * 256 / MAX_INTERVAL_S)
    assert interval == 0.0 or tokens_per_s > 8_000


def test_who_was_written_nothing_for_an_interval_does_not_wait() -> None:
    assert pause(0.04, math.inf) == 0.0
    assert pause(0.04, 0.04) == 0.0
    assert pause(0.04, 0.01) == pytest.approx(0.03)
    assert pause(0.0, 0.0) == 0.0


def test_the_share_is_of_the_time_since_the_last_look() -> None:
    wanted = iter([5.0, 5.06, 5.06])
    pacer = Pacer(100.0, lambda: next(wanted))
    assert pacer.look(100.0 + LOOK_EVERY_S / 2) == 0.0  # too early to look
    assert pacer.look(100.06) > 0.0  # all of the time
    assert pacer.look(100.2) == 0.0  # none of it


def test_time_is_wanted_while_the_thread_runs() -> None:
    began = wanted_s()
    while wanted_s() == began:
        pass
    assert wanted_s() > began


class Letters:
    def push(self, token_id: int) -> str:
        return chr(97 + token_id)

    def flush(self) -> str:
        return ""


class Running:
    """A request that the test makes tokens for."""

    def __init__(self) -> None:
        self.stream = RequestStream(TextStream(Letters(), None))
        self.ready: Callable[[], Awaitable[None]] = self.stream.ready
        self.take = self.stream.take
        self.taken = 0

    def took(self, tokens: int) -> None:
        self.taken += tokens

    def cancel(self) -> None: ...


class Written:
    """A client's end."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    async def begin(self, call: Call) -> None: ...

    async def write(self, sample: int, chunk: Chunk) -> None:
        self.chunks.append(chunk)


class Asked:
    """All that is read of a request here."""

    priority = PriorityClass.STANDARD


class NoKeys:
    """Claims of requests without an idempotency key."""

    async def give_back(self, claim: object) -> None:
        assert claim is None


INTERVAL_S = 0.3
"""Long enough for a few turns of the event loop of a busy machine."""


class Always(Pacer):
    def look(self, now: float) -> float:
        return INTERVAL_S


async def many_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_tokens_of_an_interval_are_one_message_and_the_first_after_a_rest_comes_at_once() -> None:
    calls = Calls.__new__(Calls)
    calls.clock, calls._pacer, calls._turns = MonotonicClock(), Always(0.0), Turns()
    calls.metrics = CallMetrics()
    calls._claims = NoKeys()  # type: ignore[assignment]
    running, client = Running(), Written()
    call = Call(Asked(), [running], asyncio.current_task())  # type: ignore[list-item, arg-type]
    stream = asyncio.create_task(calls._stream(call, 0, client))  # type: ignore[arg-type]
    for first in (0, 3):
        running.stream.push(first, False, None)
        await many_turns()
        assert [list(chunk.token_ids) for chunk in client.chunks][-1] == [first]  # nothing was written for a while
        for token in (first + 1, first + 2):
            running.stream.push(token, False, None)
            await many_turns()
        assert list(client.chunks[-1].token_ids) == [first]  # it waits
        while list(client.chunks[-1].token_ids) == [first]:
            await asyncio.sleep(0.01)
        assert list(client.chunks[-1].token_ids) == [first + 1, first + 2]
        await asyncio.sleep(1.5 * INTERVAL_S)
    assert "".join(chunk.text for chunk in client.chunks) == "abcdef"
    assert running.taken == 6
    running.stream.end(Terminal(Outcome(FinishReason.LENGTH), 1, 6, Timeline(0.0)))
    await asyncio.wait_for(stream, 5.0)
    assert client.chunks[-1].end is not None


class Passes:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def test_a_pass_has_so_many_turns_and_who_waits_longest_is_next() -> None:
    turns, passes, had = Turns(at_once=4), Passes(), []

    async def want(number: int) -> None:
        await turns.turn()
        had.append((passes.count, number))

    tasks = [asyncio.create_task(want(number)) for number in range(30)]
    await asyncio.sleep(0)
    for cancelled in (tasks[9], tasks[10], tasks[11], tasks[12]):  # a whole pass of those that wait
        cancelled.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10.0)
    passes.stop()
    assert [number for _, number in had] == [number for number in range(30) if not 9 <= number <= 12]
    in_a_pass = Counter(count for count, _ in had)
    assert max(in_a_pass.values()) == 4
    assert len(in_a_pass) <= 8  # no turn is lost to those that went away


async def test_nobody_waits_while_there_are_fewer_than_there_are_turns() -> None:
    turns = Turns(at_once=4)
    for _ in range(10):
        for _ in range(4):
            waits = turns.turn()
            with pytest.raises(StopIteration):
                waits.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_reports_are_read_while_many_streams_have_news() -> None:
    """Fifty streams, of which one can be written in a pass, and a report for all of them every pass."""
    calls = Calls.__new__(Calls)
    calls.clock, calls._pacer, calls._turns = MonotonicClock(), Pacer(math.inf), Turns(at_once=1)
    calls.metrics = CallMetrics()
    calls._claims = NoKeys()  # type: ignore[assignment]
    running, clients = [Running() for _ in range(50)], [Written() for _ in range(50)]
    streams = []
    for one, client in zip(running, clients, strict=True):
        call = Call(Asked(), [one], asyncio.current_task())  # type: ignore[list-item, arg-type]
        streams.append(asyncio.create_task(calls._stream(call, 0, client)))  # type: ignore[arg-type]
    for report in range(200):
        for one in running:
            one.stream.push(report % 26, False, None)
        await asyncio.sleep(0)
    for one in running:
        one.stream.end(Terminal(Outcome(FinishReason.LENGTH), 1, 200, Timeline(0.0)))
    await asyncio.wait_for(asyncio.gather(*streams), 10.0)
    for client in clients:
        tokens = [token for chunk in client.chunks for token in chunk.token_ids]
        assert tokens == [report % 26 for report in range(200)]
        assert len(client.chunks) <= 8  # of 50 tokens or so each, since that many passes went by
