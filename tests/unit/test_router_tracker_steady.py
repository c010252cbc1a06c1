"""The request tracker's short way for the tokens of a steady decode worker: nothing of the long one is lost on it."""

from __future__ import annotations

from router.effects import Ended
from router.tracker import RequestTracker
from tests.unit.test_router_tracker import LOCAL, Sink, make, token


def steady(sink: Sink, tokens: int = 3, max_tokens: int = 9) -> RequestTracker:
    """A request that one worker runs, after so many tokens."""
    tracker = make(sink, max_tokens=max_tokens)
    tracker.dispatch(LOCAL, 11.0)
    for index in range(tokens):
        token(tracker, "d0", index, 40 + index)
    return tracker


def test_a_steady_worker_that_was_given_up_is_not_heard() -> None:
    sink = Sink()
    tracker = steady(sink)
    token(tracker, "d0", 7, 99)  # nonsense: the attempt is lost
    assert not token(tracker, "d0", 3, 43)
    assert tracker.delivered == sink.tokens == [40, 41, 42]
    ended = steady(sink := Sink())
    ended.cancel(12.0)
    assert not token(ended, "d0", 3, 43)
    assert sink.tokens == [40, 41, 42]


def test_a_steady_worker_s_late_and_repeated_tokens_change_nothing() -> None:
    sink = Sink()
    tracker = steady(sink)
    before = tracker.attempt
    tracker.worker_lost("d0", "dead", 12.0)
    tracker.dispatch(LOCAL, 13.0)  # the same worker, in a new session
    for index in (3, 4):
        token(tracker, "d0", index, 40 + index)
    assert not tracker.token("d0", before, 5, 99, None, now=14.0)
    assert not token(tracker, "d0", 2, 42), "said again"
    assert tracker.delivered == sink.tokens == [40, 41, 42, 43, 44]
    assert token(tracker, "d0", 7, 99), "out of order: the attempt is lost"
    assert tracker.delivered == sink.tokens == [40, 41, 42, 43, 44]


def test_a_steady_worker_that_goes_on_for_ever_is_cut_off() -> None:
    tracker = steady(Sink(), max_tokens=4)
    assert any(isinstance(effect, Ended) for effect in token(tracker, "d0", 3, 43))  # without its being the last


def test_the_second_token_s_time_is_kept_where_one_worker_runs_the_request() -> None:
    tracker = make(Sink(), max_tokens=4)
    tracker.dispatch(LOCAL, 11.0)
    token(tracker, "d0", 0, 40, now=12)
    token(tracker, "d0", 1, 41, now=13)
    assert tracker.timeline.second_token == 13
