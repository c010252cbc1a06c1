"""Backoff and the budget of replays: pure functions and a bucket, against what they promise."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.retry import BUDGET_WINDOW_S, JITTER, REFUSED, REPLAYED, Backoff, RetryBudget


@given(times=st.integers(1, 2000), name=st.text(max_size=8))
def test_a_backoff_doubles_to_its_bound_and_is_shortened_by_a_share_at_most(times: int, name: str) -> None:
    for backoff in (REFUSED, REPLAYED):
        full = min(backoff.most_s, backoff.first_s * 2 ** min(times - 1, 40))
        assert (1 - JITTER) * full <= backoff.delay_s(times, name) <= full
        assert backoff.delay_s(times, name) == backoff.delay_s(times, name)


def test_what_failed_together_does_not_come_back_together() -> None:
    delays = sorted(Backoff(1.0, 1.0).delay_s(1, f"request-{number}") for number in range(200))
    assert len(set(delays)) == 200
    assert delays[0] < 0.55
    assert delays[-1] > 0.95
    assert all(later - earlier < 0.1 for earlier, later in itertools.pairwise(delays))


@pytest.mark.parametrize(("left_s", "most"), [(0.0, 0.0), (0.1, 0.05), (100.0, 2.0), (math.inf, 2.0)])
def test_a_deadline_leaves_time_for_the_try(left_s: float, most: float) -> None:
    delays = [REPLAYED.delay_s(times, "r", left_s) for times in range(1, 20)]
    assert max(delays) <= most
    assert max(delays) >= most / 2


def test_replays_of_an_idle_cluster_start_at_once_until_the_savings_are_spent() -> None:
    budget = RetryBudget(share=0.2, per_s=10.0, now=5.0)
    turns = [budget.turn(5.0) for _ in range(130)]
    assert turns[:100] == [5.0] * 100
    assert turns[100:] == pytest.approx([5.0 + (i + 1) / 10 for i in range(30)])
    # Nobody's turn is lost, and once the debt is paid the savings grow again.
    assert budget.balance(8.0) == pytest.approx(0.0)
    assert budget.balance(9.0) == pytest.approx(10.0)
    assert budget.balance(900.0) == 100.0


def test_starts_earn_replays_and_what_they_earned_fades() -> None:
    def savings(idle_s: float) -> int:
        budget = RetryBudget(share=0.25, per_s=1.0, now=0.0)
        for _ in range(1000):
            budget.started(0.0)
        return sum(budget.turn(idle_s) == idle_s for _ in range(1000))

    assert savings(0.0) == 260
    assert savings(BUDGET_WINDOW_S) == int(10 + 250 / math.e)
    assert savings(1e4) == 10


def test_the_place_of_one_that_ended_meanwhile_is_free() -> None:
    budget = RetryBudget(share=0.0, per_s=1.0, now=0.0)
    turns = [budget.turn(0.0) for _ in range(12)]
    assert turns[-2:] == [1.0, 2.0]
    budget.given_back(0.0)
    assert budget.turn(0.0) == 2.0


@settings(max_examples=200)
@given(
    share=st.sampled_from([0.0, 0.2, 1.0]),
    per_s=st.sampled_from([0.5, 10.0]),
    events=st.lists(
        st.tuples(st.sampled_from(["start", "turn", "turn"]), st.sampled_from([0.0, 0.0, 0.01, 0.4, 5.0, 60.0])),
        max_size=120,
    ),
)
def test_no_storm(share: float, per_s: float, events: list[tuple[str, float]]) -> None:
    """Within any time, replays are at most the minimum rate, its savings, and the share of starts so far."""
    now, starts = 0.0, 0
    budget = RetryBudget(share, per_s, now)
    turns: list[tuple[float, int]] = []
    for what, pause in events:
        now += pause
        if what == "start":
            budget.started(now)
            starts += 1
            continue
        turn = budget.turn(now)
        waiting = sum(other > now for other, _ in turns)
        assert now <= turn <= now + (waiting + 1) / per_s + 1e-6, "later than the minimum rate takes for those ahead"
        turns.append((turn, starts))
    times = sorted(time for time, _ in turns)
    for first, begin in enumerate(times):
        for last in range(first, len(times)):
            replays, span = last - first + 1, times[last] - begin
            assert replays <= per_s * (BUDGET_WINDOW_S + span) + share * starts + 1e-6
