"""Threads that die are noticed, and closing ends within its bound whatever the other end does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kv_transfer.outbound import Peer
from pdcore.clock import ManualClock, MonotonicClock
from pdcore.config import TransferConfig
from pdcore.errors import TransferError
from pdcore.types import RequestKey
from tests.contract.harness import WAIT_S, Pair, wait_until
from tests.support.kv_store import small_geometry

KEY = RequestKey("r", 0)


class Broken(BaseException):
    """Nothing that handles the errors of a frame or a ticket handles this."""


class BrokenClock(MonotonicClock):
    """Raises for the thread named `victim`."""

    victim = ""

    def now(self) -> float:
        if threading.current_thread().name == self.victim:
            raise ValueError("the clock is broken")
        return super().now()


def pair_of(transport: str, clock: MonotonicClock | ManualClock | None = None, **changes: object) -> Pair:
    values: dict[str, object] = {
        "transport": transport,
        "frame_bytes": 16384,
        "message_bytes": 4096,
        "credit_bytes": 32768,
    }
    config = TransferConfig(**{**values, **changes})  # type: ignore[arg-type]
    return Pair(small_geometry(), small_geometry(), config, clock=clock)


# --- threads that die ----------------------------------------------------------------------------------------------


def broken(layer: int, token: int) -> None:
    raise Broken


def break_gather(pair: Pair) -> None:
    pair.source.on_gather = broken


def break_scatter(pair: Pair) -> None:
    pair.target.on_scatter = broken


@pytest.mark.parametrize("break_store", [break_gather, break_scatter])
def test_a_death_over_a_frame_is_told_once(transport: str, break_store: Callable[[Pair], None]) -> None:
    with pair_of(transport, receive_threads=2) as pair:
        break_store(pair)
        pair.source.fill(pair.blocks(pair.source, 200), 200, seed=1)
        pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.finish(KEY, 1)
        wait_until(lambda: bool(pair.crashes))
        # Every thread that could tell is over before the count.
        pair.sender.close()
        pair.stop_receiver()
        assert [type(error) for error in pair.crashes] == [Broken]
        pair.crashes.clear()


@pytest.mark.parametrize("victim", ["kv-send", "kv-housekeeper"])
def test_a_death_over_a_tick_of_the_clock_is_told(transport: str, victim: str) -> None:
    clock = BrokenClock()
    with pair_of(transport, clock) as pair:
        clock.victim = victim
        wait_until(lambda: bool(pair.crashes))
        assert [str(error) for error in pair.crashes] == ["the clock is broken"]
        pair.crashes.clear()


def test_errors_of_a_frame_are_no_death(transport: str) -> None:
    def fail(layer: int, token: int) -> None:
        raise ValueError("the cache says no")

    with pair_of(transport) as pair:
        pair.target.on_scatter = fail
        assert "scatter failed: ValueError" in str(pair.transfer(KEY, 200).error)
        assert pair.crashes == []


# --- ends of streams -----------------------------------------------------------------------------------------------


def test_a_server_whose_streams_are_closed_stops_without_its_grace(transport: str) -> None:
    with pair_of(transport) as pair:
        unbound = RequestKey("unbound", 0)
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        pair.grant(unbound, 16, first=40)
        pair.receiver.close_streams()
        pair.receiver.close_streams()
        error = sending.wait().error
        assert type(error) is TransferError
        assert error.retryable
        pair.host.wait_end(KEY)
        assert pair.host.releases[0][2], "the ticket has failed, as when its stream breaks"
        assert pair.receiver.open_tickets == 1, "a ticket that no stream has filled yet stays"
        assert pair.server.stop(2 * WAIT_S).wait(WAIT_S)
        assert pair.host.ends(unbound) == 0
    assert [pair.host.ends(key) for key in (KEY, unbound)] == [1, 1]


def test_no_stream_comes_after_the_streams_are_closed(transport: str) -> None:
    with pair_of(transport) as pair:
        pair.receiver.close_streams()
        sending = pair.open(KEY, pair.grant(KEY, 16))
        pair.sender.finish(KEY, 1)
        error = sending.wait().error
        assert error is not None
        assert error.retryable
        assert pair.receiver.counters.frames == 0
        assert pair.server.stop(2 * WAIT_S).wait(WAIT_S)


# --- the sender's bound --------------------------------------------------------------------------------------------


@dataclass
class StuckLink:
    """A `PushLink` that takes half of the time it is given to end; `log` is shared by all."""

    clock: ManualClock
    log: list[tuple[str, float]]

    def finish(self) -> None:
        self.log.append(("finish", 0.0))

    def cancel(self) -> None:
        self.log.append(("cancel", 0.0))

    def close(self, timeout_s: float) -> None:
        self.log.append(("close", timeout_s))
        self.clock.advance(timeout_s / 2)


def test_the_sender_closes_all_its_links_within_one_bound(transport: str) -> None:
    clock = ManualClock()
    with pair_of(transport, clock) as pair:
        log: list[tuple[str, float]] = []
        for number in range(3):
            peer = Peer(f"stuck-{number}", "x", opened_at=0.0, heard_at=0.0, link=StuckLink(clock, log), window=1)  # type: ignore[arg-type]
            pair.sender._peers._peers[peer.address, peer.incarnation] = peer
        pair.sender.close(timeout_s=4.0)
        assert log == [*[("finish", 0.0)] * 3, ("close", 4.0), ("close", 2.0), ("close", 1.0)]
        clock.advance(1.0)
        log.clear()
        pair.sender.close(timeout_s=0.0)
        assert [timeout for name, timeout in log if name == "close"] == [0.0] * 3
        pair.sender._peers._peers.clear()
