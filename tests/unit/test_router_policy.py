"""Choice of workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdcore.step_time import StepTime
from pdcore.types import Role, WorkerLoad
from router.fleet import Fleet
from router.links import Links
from router.policy import Mode, NoRoute, Route, RouteRequest, choose
from router.snapshot import STALLED_PER_PLACE, InFlight, WorkerSnapshot

FREE = WorkerLoad(free_blocks=100, total_blocks=100)


NOTHING = InFlight()


def worker(
    name: str, role: Role, load: WorkerLoad = FREE, mine: InFlight = NOTHING, decisions: int = 0
) -> WorkerSnapshot:
    return WorkerSnapshot(
        name,
        role,
        load,
        block_size=16,
        max_requests=8,
        max_queued_prefill_tokens=1024,
        mine=mine,
        decisions=decisions,
    )


def p(name: str = "p0", queued: int = 0, **mine: int) -> WorkerSnapshot:
    return worker(name, Role.PREFILL, replace(FREE, queued_prefill_tokens=queued), InFlight(**mine))


def d(name: str = "d0", running: int = 0, free: int = 100, **mine: int) -> WorkerSnapshot:
    return worker(name, Role.DECODE, replace(FREE, running=running, free_blocks=free), InFlight(**mine))


def a(name: str = "a0", running: int = 0) -> WorkerSnapshot:
    return worker(name, Role.AGGREGATED, replace(FREE, running=running))


def route(request: RouteRequest, *workers: WorkerSnapshot) -> Route:
    fleet = Fleet.of(workers)
    chosen = choose(request, fleet)
    assert isinstance(chosen, Route), chosen
    return chosen


def no_route(request: RouteRequest, *workers: WorkerSnapshot) -> NoRoute:
    fleet = Fleet.of(workers)
    chosen = choose(request, fleet)
    assert isinstance(chosen, NoRoute), chosen
    return chosen


def asks(prompt_tokens: int, total_tokens: int = 0, **options: Any) -> RouteRequest:
    return RouteRequest(prompt_tokens, total_tokens or prompt_tokens + 1, **options)


SHORT = asks(100)


def test_disaggregates_when_both_pools_serve() -> None:
    assert route(SHORT, p(), d()) == Route(Mode.DISAGGREGATED, "d0", "p0", "prefill_pool_serves")
    assert route(SHORT, p(), d(), a()).mode is Mode.DISAGGREGATED


def test_local_without_a_prefill_pool() -> None:
    assert route(SHORT, d()) == Route(Mode.LOCAL, "d0", None, "prefill_pool_empty")
    assert route(asks(100, exclude=frozenset({"p0"})), p(), d()).reason == "prefill_pool_left_out"
    assert route(SHORT, a(), d()) == Route(Mode.LOCAL, "a0", None, "aggregated_pool")
    assert route(SHORT, a(), p()) == Route(Mode.LOCAL, "a0", None, "decode_pool_empty")


def test_prefill_workers_decode_if_nobody_else_can() -> None:
    assert route(SHORT, p(), p("p1", queued=500)) == Route(Mode.LOCAL, "p0", None, "decode_pool_empty")
    assert route(asks(100, resumes=True), p()) == Route(Mode.LOCAL, "p0", None, "replay")
    assert no_route(asks(100, 1601), p()).busy is False, "its cache is too small"
    assert no_route(asks(100, exclude=frozenset({"d0"})), p(), d()).busy is False, "d0 is there"
    assert no_route(asks(100, exclude=frozenset({"a0"})), p(), a()).busy is False
    assert no_route(SHORT).busy is False


def test_least_loaded() -> None:
    chosen = route(SHORT, p("p0", queued=500), p("p1", queued=100), d("d0", running=3), d("d1", running=2))
    assert (chosen.prefill, chosen.decode) == ("p1", "d1")
    assert route(SHORT, p(), d("d0", free=50), d("d1", free=60)).decode == "d1"


def test_what_was_just_sent_counts_though_no_report_has_it() -> None:
    chosen = route(
        SHORT,
        p("p0", new_prefill_tokens=200, prefill_tokens=200),
        p("p1", queued=100),
        d("d0", new_requests=3, requests=3),
        d("d1", running=2),
    )
    assert (chosen.prefill, chosen.decode) == ("p1", "d1")


def test_a_report_that_crossed_a_request_hides_nothing() -> None:
    # The report came after the request was sent, but was made before it arrived: nothing is new, 900 tokens are mine.
    mine = {"prefill_tokens": 1900, "longest_prefill": 950, "requests": 2}
    assert no_route(asks(200), p(**mine), d()).busy is True


def test_what_two_routers_have_sent_is_counted_once_each() -> None:
    """The report has the work of both; mine since then is added, and nothing of mine that it has is counted twice."""
    load = replace(FREE, running=3, waiting=1, open_tickets=2, queued_prefill_tokens=700, free_blocks=40)
    mine = InFlight(requests=4, prefill_tokens=500, new_requests=1, new_prefill_tokens=200, new_blocks=5)
    seen = worker("d0", Role.DECODE, load, mine)
    assert (seen.requests, seen.queued_prefill_tokens, seen.free_blocks) == (7, 900, 35)
    # What the other one has sent fills the last place for this one too.
    assert no_route(SHORT, p(), worker("d0", Role.DECODE, replace(FREE, running=7), InFlight(new_requests=1))).busy


def test_clients_that_take_nothing_hold_no_place_and_no_memory() -> None:
    load = replace(FREE, running=1, paused=300, free_blocks=0, stalled_requests=128, stalled_blocks=50)
    seen = worker("d0", Role.DECODE, load)
    assert (seen.requests, seen.free_blocks) == (301 - 128, 50)
    assert no_route(SHORT, p(), seen).busy
    some = replace(load, paused=100, stalled_requests=100)
    assert route(SHORT, p(), worker("d0", Role.DECODE, some)).decode == "d0"
    assert no_route(SHORT, p(), worker("d0", Role.DECODE, replace(some, stalled_blocks=6))).busy
    # But they are remembered, so there is a bound to them too.
    many = replace(load, paused=1000, stalled_requests=1000)
    assert worker("d0", Role.DECODE, many).requests == 1001 - STALLED_PER_PLACE * 8
    gone = worker("d0", Role.DECODE, replace(FREE, stalled_requests=3))
    assert gone.requests == 0


def test_equals_take_turns() -> None:
    counts: Counter[str] = Counter()
    for _ in range(30):
        pool = [worker(f"d{i}", Role.DECODE, decisions=counts[f"d{i}"]) for i in range(3)]
        counts[route(SHORT, p(), *pool).decode] += 1
    assert set(counts.values()) == {10}


def test_prefill_queue_is_bounded_but_an_idle_worker_takes_any_length() -> None:
    assert route(asks(1500), p(), d()).prefill == "p0"
    assert route(asks(1500), p(queued=1024), d()).prefill == "p0"
    assert no_route(asks(1500), p(queued=1025), d()).busy is True


def test_a_short_prompt_passes_a_long_one_and_a_second_long_one_waits() -> None:
    long_one = {"queued": 10_000, "prefill_tokens": 10_000, "longest_prefill": 10_000, "requests": 1}
    assert route(asks(50), p(**long_one), d()).prefill == "p0"
    assert route(asks(1024), p(**long_one), d()).prefill == "p0"
    assert no_route(asks(1025), p(**long_one), d()).busy is True
    with_short_ones = long_one | {"queued": 11_000, "prefill_tokens": 11_000, "requests": 6}
    assert route(asks(24), p(**with_short_ones), d()).prefill == "p0"
    assert no_route(asks(25), p(**with_short_ones), d()).busy is True


def test_a_full_decode_pool() -> None:
    assert no_route(SHORT, p(), d(running=8)).busy is True
    assert no_route(SHORT, p(), d(running=1, free=6)).busy is True  # 101 tokens need 7 blocks
    assert route(SHORT, p(), d(running=1, free=7)).decode == "d0"
    assert no_route(SHORT, p(), d(running=1, free=9, new_blocks=3)).busy is True


def test_an_aggregated_worker_takes_what_full_pools_cannot() -> None:
    assert route(SHORT, p(), d(running=8), a()) == Route(Mode.LOCAL, "a0", None, "pools_full")


def test_a_replay_with_delivered_tokens_is_local() -> None:
    chosen = route(asks(100, resumes=True), p(), d())
    assert chosen == Route(Mode.LOCAL, "d0", None, "replay")
    assert route(asks(100, resumes=True), p(), d(), a(running=5)).decode == "d0"


def test_local_only() -> None:
    assert route(asks(100, local_only=True), p(), d()).mode is Mode.LOCAL


def test_exclude_is_hard_and_avoid_is_soft() -> None:
    assert no_route(asks(100, exclude=frozenset({"d0"})), p(), d()).busy is False
    assert no_route(asks(100, closed=np.array([False, True])), p(), d()).busy is False
    others = asks(100, exclude=frozenset({"d1"}), closed=np.array([False, True, False, False]))
    assert route(others, p(), d("d0"), d("d1"), d("d2", running=7)).decode == "d2"
    avoiding = asks(100, avoid=frozenset({"d0", "p0"}))
    chosen = route(avoiding, p("p0"), p("p1", queued=900), d("d0"), d("d1", running=7))
    assert (chosen.prefill, chosen.decode) == ("p1", "d1")
    assert route(avoiding, p("p0"), d("d0")).decode == "d0"


def test_a_prompt_larger_than_the_prefill_pools_cache_runs_locally() -> None:
    small = worker("p0", Role.PREFILL, WorkerLoad(free_blocks=4, total_blocks=4))
    assert route(asks(64), small, d()) == Route(Mode.LOCAL, "d0", None, "prompt_too_large_for_prefill_pool")
    assert route(asks(64), small, d(), a()) == Route(Mode.LOCAL, "a0", None, "prompt_too_large_for_prefill_pool")
    assert route(asks(63), small, d()).mode is Mode.DISAGGREGATED
    assert route(asks(64), small, p("p1"), d()).prefill == "p1"


def test_only_a_worker_that_holds_prompt_and_output_decodes() -> None:
    small = worker("small", Role.DECODE, WorkerLoad(free_blocks=4, total_blocks=4))
    busy = d("large", running=5)
    assert route(asks(20, 64), p(), small, busy).decode == "small"
    assert route(asks(20, 65), p(), small, busy).decode == "large"
    assert route(asks(20, 65), small, busy).decode == "large"
    assert route(asks(20, 65, resumes=True), p(), small, busy).decode == "large"
    assert route(asks(20, 65, local_only=True), p(), small, busy).decode == "large"
    assert no_route(asks(20, 65), p(), small).busy is False
    assert route(asks(20, 65), p(), small, a()).reason == "request_too_large_for_decode_pool"
    little = worker("little", Role.AGGREGATED, WorkerLoad(free_blocks=4, total_blocks=4))
    assert no_route(asks(20, 65), little).busy is False
    assert route(asks(20, 65), little, a("a1", running=5)).decode == "a1"


def test_each_worker_has_its_own_bound_of_queued_prefill() -> None:
    slow = replace(p("p0", queued=257), max_queued_prefill_tokens=256)
    assert no_route(asks(600), slow, d()).busy is True
    assert route(asks(600), slow, p("p1", queued=512), d()).prefill == "p1"
    assert route(asks(600), replace(slow, max_queued_prefill_tokens=257), d()).prefill == "p0"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Role),
            st.integers(0, 10),
            st.integers(0, 2000),
            st.integers(0, 100),
        ),
        max_size=6,
    ),
    st.integers(1, 1500),
    st.booleans(),
)
def test_a_route_always_fits(drawn: list[tuple[Role, int, int, int]], tokens: int, resumes: bool) -> None:
    pool = {
        f"w{i}": worker(f"w{i}", role, replace(FREE, running=running, queued_prefill_tokens=queued, free_blocks=free))
        for i, (role, running, queued, free) in enumerate(drawn)
    }
    chosen = choose(asks(tokens, resumes=resumes), Fleet.of(list(pool.values())))
    if isinstance(chosen, NoRoute):
        return
    decode = pool[chosen.decode]
    assert decode.capacity_tokens > tokens
    assert decode.role is not Role.PREFILL or {w.role for w in pool.values()} == {Role.PREFILL}
    assert decode.requests < decode.max_requests
    assert decode.requests == 0 or decode.free_blocks * decode.block_size > tokens
    starter = decode if chosen.prefill is None else pool[chosen.prefill]
    assert min(starter.queued_prefill_tokens, tokens) <= 1024  # one of them is the longest
    assert (chosen.prefill is None) == (chosen.mode is Mode.LOCAL)
    if chosen.prefill is not None:
        assert starter.role is Role.PREFILL
        assert not resumes


def test_samples_whose_ticket_no_pool_holds_run_as_a_whole() -> None:
    tiny = worker("d0", Role.DECODE, replace(FREE, free_blocks=3, total_blocks=10, running=2))
    # 7 blocks for 96 tokens and the first new one, and one for each of the other samples.
    fits, never = asks(96, 120, samples=4), asks(96, 120, samples=5)
    assert no_route(fits, p(), tiny).busy
    assert route(fits, p(), replace(tiny, load=replace(tiny.load, free_blocks=10))).mode is Mode.DISAGGREGATED
    assert no_route(never, p(), tiny).busy, "it waits for room there, and not for a ticket"
    chosen = route(never, p(), replace(tiny, load=replace(tiny.load, free_blocks=7)))
    assert (chosen.mode, chosen.decode, chosen.reason) == (Mode.LOCAL, "d0", "kv_reservation_too_large")
    assert route(never, p(), tiny, d("d1")).decode == "d1"


def test_an_interactive_request_goes_where_batch_ones_make_room_for_its_ticket() -> None:
    full = worker("d0", Role.DECODE, replace(FREE, running=8, free_blocks=2, yielding_requests=3, yielding_blocks=6))
    assert route(asks(100, interactive=True), p(), full).decode == "d0"
    assert no_route(asks(100), p(), full).busy
    assert no_route(asks(140, interactive=True), p(), full).busy, "9 blocks, and 8 are to be had"
    # Nobody has to give way where another has room, busier or not.
    busy = d("d1", running=7, free=20)
    assert (
        route(asks(100, interactive=True), p(), replace(full, load=replace(full.load, running=2)), busy).decode
        == "d1"
    )


def test_what_is_cached_does_not_count_against_a_worker_s_queue() -> None:
    busy = p(queued=1500, requests=2, prefill_tokens=1500, longest_prefill=900)
    assert no_route(asks(500), busy, d()).busy is True
    knows = np.array([480.0, 0.0])
    assert route(asks(500, cached=knows), busy, d()).prefill == "p0"


MODEL = StepTime(base_ms=10.0, token_ms=1.0, attended_ms=0.0001, steps=50, largest=512)
"""A step of 512 tokens takes half a second."""


def timed(snapshot: WorkerSnapshot, model: StepTime = MODEL) -> WorkerSnapshot:
    return replace(snapshot, load=replace(snapshot.load, step_time=model), max_num_batched_tokens=512)


class TestDisaggregateOrNot:
    """By hand: with 1 ms a token and 10 ms a step, a prompt of n tokens is 10 + n ms where it is computed alone."""

    def asked(self, tokens: int, **options: Any) -> RouteRequest:
        return asks(tokens, disaggregate="auto", **{"handover_ms": 10.0, **options})

    def test_short_prompts_are_not_worth_a_handover(self) -> None:
        both = [timed(p()), timed(d())]
        chosen = route(self.asked(20), *both)
        assert (chosen.mode, chosen.decode, chosen.reason) == (Mode.LOCAL, "d0", "short_prompt")
        # A quarter more for computing where streams live: 0.25 * (10 + n) is 10 for 30 tokens.
        assert route(self.asked(29), *both).mode is Mode.LOCAL
        chosen = route(self.asked(31), *both)
        assert (chosen.mode, chosen.reason) == (Mode.DISAGGREGATED, "cheaper_by_prediction")
        assert route(self.asked(20, handover_ms=1.0), *both).mode is Mode.DISAGGREGATED

    def test_always_is_always_and_so_is_not_knowing_better(self) -> None:
        chosen = route(asks(20, handover_ms=10.0), timed(p()), timed(d()))
        assert (chosen.mode, chosen.reason) == (Mode.DISAGGREGATED, "prefill_pool_serves")
        decodes_only = replace(MODEL, largest=8)
        for workers in ((p(), d()), (p(), timed(d(), decodes_only)), (timed(p(), decodes_only), d())):
            chosen = route(self.asked(20), *workers)
            assert (chosen.mode, chosen.reason) == (Mode.DISAGGREGATED, "prefill_pool_serves")

    def test_decodes_say_little_of_prompts(self) -> None:
        """A decode worker that has seen steps of a few tokens only, which cost nothing, is no faster than others."""
        optimist = replace(MODEL, token_ms=0.0, largest=8)
        assert route(self.asked(400), timed(p()), timed(d(), optimist)).mode is Mode.DISAGGREGATED
        slow = replace(MODEL, base_ms=40.0, largest=8)
        assert route(self.asked(20), timed(p()), timed(d(), slow)).mode is Mode.DISAGGREGATED

    def test_what_the_decode_worker_holds_it_need_not_be_sent(self) -> None:
        both = [timed(p()), timed(d())]
        chosen = route(self.asked(400, cached=np.array([0.0, 384.0])), *both)
        assert (chosen.mode, chosen.reason, chosen.lacking) == (Mode.LOCAL, "cached_there", 16)
        chosen = route(self.asked(400, cached=np.array([384.0, 0.0])), *both)
        assert (chosen.mode, chosen.lacking) == (Mode.DISAGGREGATED, 16)

    def test_a_queue_before_the_prefill_pool(self) -> None:
        busy = timed(p(queued=300))
        chosen = route(self.asked(400), busy, timed(d()))
        assert (chosen.mode, chosen.reason) == (Mode.LOCAL, "prefill_pool_busy")
        assert route(self.asked(400), timed(p(queued=30)), timed(d())).mode is Mode.DISAGGREGATED
        full = timed(p(queued=5000))
        chosen = route(self.asked(400), full, timed(d()))
        assert (chosen.mode, chosen.reason) == (Mode.LOCAL, "prefill_pool_full")
        assert no_route(asks(400), full, timed(d())).busy

    def test_a_slow_link(self) -> None:
        both = [timed(p()), timed(d())]
        slow, fast = Links(), Links()
        slow.seen(0, 1, 2.0)
        fast.seen(0, 1, 0.9)
        chosen = route(self.asked(400, links=slow), *both)
        assert (chosen.mode, chosen.reason) == (Mode.LOCAL, "slow_link")
        # 0.9 ms a token is hidden behind computing it.
        assert route(self.asked(400, links=fast), *both).mode is Mode.DISAGGREGATED

    def test_the_decode_worker_at_the_faster_link(self) -> None:
        links = Links()
        for number, ms in ((1, 4.0), (2, 0.5)):
            links.seen(0, number, ms)
        three = [timed(p()), timed(d("near", running=1)), timed(d("far", running=2))]
        assert route(asks(400), *three).decode == "near"
        assert route(asks(400, links=links), *three).decode == "far"

    def test_streams_that_run_there_pay_for_it(self) -> None:
        one = timed(d(running=1))
        assert route(self.asked(20), timed(p()), one).mode is Mode.DISAGGREGATED
        assert route(self.asked(1), timed(p()), timed(d(running=0))).mode is Mode.LOCAL
        chosen = route(self.asked(400), timed(p(queued=900)), one)
        assert (chosen.mode, chosen.reason) == (Mode.LOCAL, "prefill_pool_busy")

    def test_their_objective_is_kept_even_if_the_prompt_waits(self) -> None:
        asked = self.asked(400, itl_ms=200.0)
        chosen = route(asked, timed(p(queued=900)), timed(d(running=1)))
        assert (chosen.mode, chosen.reason) == (Mode.DISAGGREGATED, "streams_keep_their_pace")
        assert route(asked, timed(p(queued=900)), timed(d())).mode is Mode.LOCAL, "nobody is there"
        assert route(self.asked(400, itl_ms=600.0), timed(p(queued=900)), timed(d(running=1))).mode is Mode.LOCAL
        elsewhere = route(asked, timed(p(queued=900)), timed(d(running=1)), timed(d("d1")))
        assert (elsewhere.mode, elsewhere.decode) == (Mode.LOCAL, "d1")
        # Without it the request could not run at all, and waits for the prefill pool.
        assert no_route(asked, timed(p(queued=9000)), timed(d(running=1))).busy

    def test_a_decode_pool_without_room(self) -> None:
        assert no_route(self.asked(20), timed(p()), timed(d(running=8))).busy
        computes = timed(d(prefill_tokens=5000))
        chosen = route(self.asked(20), timed(p()), computes)
        assert (chosen.mode, chosen.reason) == (Mode.DISAGGREGATED, "decode_pool_busy")
        chosen = route(self.asked(20), timed(p()), timed(d(running=8)), timed(a()))
        assert (chosen.mode, chosen.decode, chosen.reason) == (Mode.LOCAL, "a0", "decode_pool_full")
