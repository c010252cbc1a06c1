"""Which attempt a request's timeline describes."""

from __future__ import annotations

from dataclasses import replace

from pdcore.types import FinishReason
from router.policy import Mode, Route
from tests.unit.test_router_tracker import STATS, make, to_prefilling, token


def test_the_timeline_is_of_the_last_attempt_that_gave_a_token() -> None:
    tracker = make()
    to_prefilling(tracker)
    token(tracker, "p0", 0, 50, now=12.0)
    tracker.kv_received("d0", 1, STATS)
    token(tracker, "d0", 1, 51)
    timeline = tracker.timeline

    def told() -> tuple[str, str, str, object]:
        return timeline.mode, timeline.prefill_worker, timeline.decode_worker, timeline.kv

    assert told() == ("disaggregated", "p0", "d0", STATS)
    # One that gives none is not described, though its transfer was done.
    tracker.worker_lost("d0", "dead", 13.0)
    other = replace(STATS, blocks=STATS.blocks + 1)
    tracker.dispatch(Route(Mode.DISAGGREGATED, "d1", "p1", "always"), 14.0)
    tracker.reserve_granted("d1", 2)
    tracker.kv_received("d1", 2, other)
    assert told() == ("disaggregated", "p0", "d0", STATS)
    tracker.worker_lost("d1", "dead", 15.0)
    tracker.dispatch(Route(Mode.DISAGGREGATED, "d2", "p2", "always"), 16.0)
    tracker.reserve_granted("d2", 3)
    # The decode worker may be heard before the prefill worker.
    tracker.kv_received("d2", 3, other)
    token(tracker, "p2", 2, 52)
    assert told() == ("disaggregated", "p2", "d2", other)
    assert timeline.first_token == 12.0
    token(tracker, "d2", 3, 53, FinishReason.LENGTH)
    assert told() == ("disaggregated", "p2", "d2", other)
