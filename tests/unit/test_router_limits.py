"""Tenants' limits: against an oracle that fills buckets tick by tick, and what the module promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.classes import TenantLimits
from pdcore.types import PriorityClass
from router.limits import CONCURRENT_RETRY_S, Charge, TenantBook

TICKS_PER_S = 8
"""Times are whole eighths of a second and rates multiples of 480 a minute, so that all numbers are exact."""


@dataclass
class Bucket:
    """Fills one tick at a time."""

    per_minute: int
    level: int = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.per_minute

    def tick(self) -> None:
        self.level = min(self.per_minute, self.level + self.per_minute // (60 * TICKS_PER_S))

    def has(self, wanted: int) -> bool:
        return not self.per_minute or self.level >= min(wanted, self.per_minute)

    def take(self, wanted: int) -> None:
        self.level = min(self.per_minute, self.level - wanted)


class Oracle:
    """One tenant's limits, by the words of the module."""

    def __init__(self, limits: TenantLimits) -> None:
        self.requests, self.tokens = Bucket(limits.requests_per_minute), Bucket(limits.tokens_per_minute)
        self.max_concurrent, self.running = limits.max_concurrent, 0

    def tick(self) -> None:
        self.requests.tick()
        self.tokens.tick()

    def lets_in(self, tokens: int) -> bool:
        room = not self.max_concurrent or self.running < self.max_concurrent
        return room and self.requests.has(1) and self.tokens.has(tokens)


RATES = st.sampled_from([0, 480, 960])
LIMITS = st.builds(
    TenantLimits,
    tenant=st.just("a"),
    requests_per_minute=RATES,
    tokens_per_minute=RATES,
    max_concurrent=st.integers(0, 3),
)
# Ticks to wait, then: a request of so many tokens, or the end of one of those that run.
REQUESTS = st.tuples(st.just("request"), st.integers(1, 1500))
ENDS = st.tuples(st.sampled_from(["end", "shed"]), st.integers(0, 1500))
EVENTS = st.lists(st.tuples(st.integers(0, 200), REQUESTS | ENDS), max_size=60)


@given(LIMITS, EVENTS)
def test_as_buckets_that_fill_tick_by_tick(limits: TenantLimits, events: list) -> None:  # type: ignore[type-arg]
    book, oracle = TenantBook([limits]), Oracle(limits)
    running: list[Charge] = []
    ticks = 0
    for wait, (what, tokens) in events:
        for _ in range(wait):
            oracle.tick()
        ticks += wait
        now = ticks / TICKS_PER_S
        if what == "request":
            over = book.over_limit("a", tokens, now)
            assert (over is None) == oracle.lets_in(tokens)
            if over is None:
                running.append(book.admit("a", tokens, now))
                oracle.running += 1
                oracle.requests.take(1)
                oracle.tokens.take(tokens)
        elif running:
            charge = running.pop(tokens % len(running))
            used = 0 if what == "shed" else min(tokens, charge.tokens)
            for _ in range(2):  # the second time changes nothing
                book.settle(charge, used, now, counts=what != "shed")
            oracle.running -= 1
            oracle.tokens.take(used - charge.tokens)
            if what == "shed":
                oracle.requests.take(-1)
        if limits.limited:
            assert book.running("a") == oracle.running == len(running)


@given(LIMITS, EVENTS)
def test_the_hint_is_the_time_until_it_would_be_let_in(limits: TenantLimits, events: list) -> None:  # type: ignore[type-arg]
    book = TenantBook([limits])
    now = 0.0
    for wait, (what, tokens) in events:
        now += wait / TICKS_PER_S
        if what != "request":
            continue
        over = book.over_limit("a", tokens, now)
        if over is None:
            book.admit("a", tokens, now)
        elif limits.max_concurrent == 0:  # else it is a guess
            assert book.over_limit("a", tokens, now + over.retry_after_s * 0.99 - 1e-6) is not None
            now += over.retry_after_s + 1e-6
            assert book.over_limit("a", tokens, now) is None


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 400)), max_size=80))
def test_no_stretch_of_time_gives_more_than_rate_and_bucket(arrivals: list[tuple[int, int]]) -> None:
    per_minute = 480
    book = TenantBook([TenantLimits("a", tokens_per_minute=per_minute)])
    had: list[tuple[float, int]] = []
    now = 0.0
    for wait, tokens in arrivals:
        now += wait / TICKS_PER_S
        if book.over_limit("a", tokens, now) is None:
            book.admit("a", tokens, now)
            had.append((now, tokens))
    for first in range(len(had)):
        total = 0
        for time, tokens in had[first:]:
            total += tokens
            # Equal by hand is off by a last bit in floats, now and then.
            assert total <= per_minute * (1 + (time - had[first][0]) / 60) + 1e-6


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    book = TenantBook([TenantLimits("a", tokens_per_minute=600)])
    assert book.over_limit("a", 1200, 0.0) is None
    book.admit("a", 1200, 0.0)
    over = book.over_limit("a", 1, 0.0)
    assert over is not None
    assert over.limit == "600 tokens a minute"
    assert over.retry_after_s == pytest.approx(60.1)
    assert book.over_limit("a", 0, 59.0) is not None, "in debt nothing goes in"


def test_what_was_not_used_comes_back() -> None:
    book = TenantBook([TenantLimits("a", tokens_per_minute=600)])
    charge = book.admit("a", 600, 0.0)
    assert book.over_limit("a", 100, 0.0) is not None
    book.settle(charge, 500, 0.0)
    assert book.over_limit("a", 100, 0.0) is None


def test_all_running_is_said_with_a_guess() -> None:
    book = TenantBook([TenantLimits("a", max_concurrent=1)])
    charge = book.admit("a", 5, 0.0)
    assert book.over_limit("a", 5, 100.0) == ("1 requests at a time", CONCURRENT_RETRY_S)
    book.settle(charge, 5, 100.0)
    assert book.over_limit("a", 5, 100.0) is None


def test_tenants_do_not_touch_each_other_and_others_have_limits_of_their_own() -> None:
    book = TenantBook([TenantLimits("a", max_concurrent=1), TenantLimits("*", max_concurrent=2)])
    for tenant, places in (("a", 1), ("x", 2), ("y", 2), ("", 2)):
        for _ in range(places):
            assert book.over_limit(tenant, 1, 0.0) is None
            book.admit(tenant, 1, 0.0)
        assert book.over_limit(tenant, 1, 0.0) is not None


def test_without_limits_nothing_is_kept() -> None:
    book = TenantBook([TenantLimits("a", default_class=PriorityClass.BATCH)])
    for number in range(100):
        charge = book.admit(str(number), 10, 0.0)
        assert book.over_limit(str(number), 10**9, 0.0) is None
        book.settle(charge, 10, 0.0)
    assert len(book) == 0
    assert book.default_class("a") is PriorityClass.BATCH
    assert book.default_class("b") is PriorityClass.STANDARD


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200), st.integers(1, 6))
def test_memory_is_bounded_and_nobody_running_or_named_is_forgotten(
    asks: list[tuple[int, bool]], max_tenants: int
) -> None:
    limits = [TenantLimits("named", tokens_per_minute=60), TenantLimits("*", max_concurrent=5)]
    book = TenantBook(limits, max_tenants=max_tenants)
    book.admit("named", 600, 0.0)
    running: dict[str, list[Charge]] = {}
    counts: Counter[str] = Counter()
    for number, ends in asks:
        tenant = str(number)
        if ends and running.get(tenant):
            book.settle(running[tenant].pop(), 1, 0.0)
            counts[tenant] -= 1
        elif book.over_limit(tenant, 1, 0.0) is None:
            running.setdefault(tenant, []).append(book.admit(tenant, 1, 0.0))
            counts[tenant] += 1
        for name, count in counts.items():
            if count:
                assert book.running(name) == count <= 5
        busy = sum(1 for count in counts.values() if count)
        assert len(book) <= 1 + max(max_tenants, busy + 1)
        assert book.over_limit("named", 1, 0.0) is not None
