"""Whose memory is taken and in which way, against oracles that go token by token and view by view."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.preemption import (
    HEADROOM_BLOCKS,
    Loss,
    PreemptionTerms,
    Rate,
    Shortage,
    expected_kept,
    headroom,
    recompute_seconds,
    swap_is_better,
    swap_seconds,
)
from engine.scheduler import SchedulerSnapshot, SequenceView, TicketView, schedule
from pdcore.config import SchedulerConfig
from pdcore.types import RequestKey

TERMS = PreemptionTerms("auto", 1000, out_bytes_s=1e6, in_bytes_s=2e6, prefill_tokens_s=100.0)
BLOCK = 16
CONFIG = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, prefill_chunk_tokens=48)


class TestCostModel:
    def test_a_case_by_hand(self) -> None:
        loss = Loss(computed=100, held=20, kept=30)
        assert loss.lost == 50
        assert swap_seconds(loss, TERMS) == pytest.approx(80 * 1000 / 1e6 + 50 * 1000 / 2e6)
        assert recompute_seconds(loss, TERMS) == pytest.approx(50 / 100)
        assert recompute_seconds(loss, replace(TERMS, recompute_weight=4.0)) == pytest.approx(2.0)
        assert swap_is_better(loss, TERMS)

    @given(
        tokens=st.lists(st.sampled_from(["held", "kept", "lost"]), max_size=60),
        rates=st.tuples(*[st.integers(1, 500)] * 3),
        weight=st.integers(1, 5),
    )
    def test_agrees_with_an_oracle_that_goes_token_by_token(
        self, tokens: list[str], rates: tuple[int, int, int], weight: int
    ) -> None:
        out, back, prefill = rates
        terms = PreemptionTerms("auto", 7, float(out), float(back), float(prefill), float(weight))
        swap = recompute = 0.0
        for token in tokens:
            swap += 7 / out if token != "held" else 0.0
            swap += 7 / back if token == "lost" else 0.0
            recompute += weight / prefill if token == "lost" else 0.0
        loss = Loss(len(tokens), tokens.count("held"), tokens.count("kept"))
        assert swap_seconds(loss, terms) == pytest.approx(swap)
        assert recompute_seconds(loss, terms) == pytest.approx(recompute)
        if not math.isclose(swap, recompute):
            assert swap_is_better(loss, terms) == (swap < recompute)
        assert swap_is_better(loss, replace(terms, mode="recompute")) is False
        assert swap_is_better(loss, replace(terms, mode="swap")) == any(token != "held" for token in tokens)

    def test_what_the_cache_keeps_is_neither_copied_back_nor_computed(self) -> None:
        assert not swap_is_better(Loss(100, kept=100), TERMS), "dropping costs nothing then"

    @given(freed=st.integers(0, 30), cached=st.integers(0, 30), wanted=st.integers(0, 30))
    def test_expected_kept_plays_the_worst_case(self, freed: int, cached: int, wanted: int) -> None:
        cached = min(cached, freed)
        pool = ["plain"] * (freed - cached) + ["cached"] * cached
        assert expected_kept(freed, cached, wanted) == len([block for block in pool[wanted:] if block == "cached"])


class TestRate:
    def test_assumes_until_measured(self) -> None:
        rate = Rate(5.0)
        rate.add(10, 0.0)
        rate.add(0, 1.0)
        assert rate.per_second == 5.0
        rate.add(10, 1.0)
        assert rate.per_second == 10.0

    def test_follows_a_change_and_weighs_by_size(self) -> None:
        rate = Rate(1.0)
        rate.add(1000, 1.0)
        rate.add(1, 0.5)
        assert rate.per_second > 500, "a small one hardly counts"
        for _ in range(40):
            rate.add(100, 1.0)
        assert rate.per_second == pytest.approx(100, rel=0.01)


def key(name: str) -> RequestKey:
    return RequestKey(name, 0)


def runs(name: str, known: int = 20, *, blocks: int = 2, **more: object) -> SequenceView:
    """A running decode."""
    view = SequenceView(key(name), known, known - 1, blocks, blocks, 100, True, True, 0, 0)
    return view._replace(**more)  # type: ignore[arg-type]


def pauses(name: str, *, stalled: bool = True, **more: object) -> SequenceView:
    return runs(name, has_credit=False, stalled=stalled, **more)


def waits(name: str, known: int = 20, **more: object) -> SequenceView:
    view = SequenceView(key(name), known, 0, 0, -(-(known + 1) // BLOCK), 100, True, True, 0, 0)
    return view._replace(**more)  # type: ignore[arg-type]


def snapshot(
    *views: SequenceView, free: int = 0, room: int = 100, wanted: int = 0, tickets: tuple[TicketView, ...] = ()
) -> SchedulerSnapshot:
    return SchedulerSnapshot(views, tickets, free, BLOCK, room, wanted)


NEEDY = runs("a", 17, blocks=1)


class TestVictims:
    def test_a_swap_frees_its_blocks_later_and_is_waited_for(self) -> None:
        views = [NEEDY, runs("b"), runs("c", swap_blocks=2)]
        decision = schedule(snapshot(*views), CONFIG)
        assert (decision.swap_out, decision.preempt) == ((key("c"),), ())
        assert decision.sitting_out == (key("a"),)
        assert [chunk.key for chunk in decision.chunks] == [key("b")]
        views[2] = waits("c", copying=True, leaving_blocks=2)
        decision = schedule(snapshot(*views), CONFIG)
        assert (decision.swap_out, decision.preempt) == ((), ()), "enough is on its way"
        decision = schedule(snapshot(NEEDY, runs("b", 33, swap_blocks=2), views[2]), CONFIG)
        assert (decision.swap_out, decision.sitting_out) == ((), (key("a"), key("b"))), "a block for each"

    def test_as_many_are_swapped_as_blocks_are_lacking(self) -> None:
        views = [
            NEEDY,
            runs("b", 17, blocks=1),
            runs("c", blocks=1, known=10, swap_blocks=1),
            runs("d", swap_blocks=1),
        ]
        decision = schedule(snapshot(*views), CONFIG)
        assert decision.swap_out == (key("d"),)
        views[3] = runs("d", blocks=1, known=10, swap_blocks=1)
        assert schedule(snapshot(*views), CONFIG).swap_out == (key("d"), key("c"))

    def test_what_a_swapped_one_shares_with_a_dropped_one_comes_when_it_is_copied(self) -> None:
        shared = {"shared": (5, 6), "stalled": True, "has_credit": False}
        views = [NEEDY, runs("b", last_step=2, **shared), runs("c", last_step=1, swap_blocks=2, **shared)]
        decision = schedule(replace(snapshot(*views), holders={5: 2, 6: 2}), CONFIG)
        assert (decision.swap_out, decision.preempt) == ((key("c"),), (key("b"),))
        assert (decision.chunks, decision.sitting_out) == ((), (key("a"),))
        leaving = waits("c", copying=True, leaving_blocks=2, has_credit=False)
        decision = schedule(replace(snapshot(NEEDY, runs("x"), leaving), holders={}), CONFIG)
        assert (decision.preempt, decision.sitting_out) == ((), (key("a"),)), "and is waited for"

    def test_stalled_ones_that_share_all_they_have_give_way_together(self) -> None:
        shared = {"shared": (5, 6), "stalled": True, "has_credit": False}
        views = [NEEDY, runs("b", last_step=2, **shared), runs("c", last_step=1, **shared), runs("d")]
        decision = schedule(replace(snapshot(*views), holders={5: 2, 6: 2}), CONFIG)
        assert decision.preempt == (key("c"), key("b"))
        assert [chunk.key for chunk in decision.chunks] == [key("a"), key("d")]
        decision = schedule(replace(snapshot(waits("w", 20), *views[1:3]), holders={5: 2, 6: 2}), CONFIG)
        assert decision.preempt == (key("c"), key("b")), "for one that waits too"
        decision = schedule(replace(snapshot(*views), holders={5: 3, 6: 3}), CONFIG)
        assert decision.preempt == (key("d"),), "somebody else holds it: they would free nothing"

    def test_who_does_not_fit_into_host_memory_is_dropped(self) -> None:
        views = [NEEDY, runs("b", swap_blocks=3)]
        assert schedule(snapshot(*views, room=3), CONFIG).swap_out == (key("b"),)
        decision = schedule(snapshot(*views, room=2), CONFIG)
        assert (decision.preempt, decision.swap_out, decision.sitting_out) == ((key("b"),), (), ())

    def test_no_one_is_chosen_again_before_it_has_made_progress(self) -> None:
        views = [NEEDY, runs("b"), runs("c", preempted=True)]
        assert schedule(snapshot(*views), CONFIG).preempt == (key("b"),)
        views[1] = runs("b", preempted=True)
        decision = schedule(snapshot(*views), CONFIG)
        assert (decision.preempt, decision.sitting_out) == ((), (key("a"),))
        assert [chunk.key for chunk in decision.chunks] == [key("b"), key("c")]

    def test_who_is_being_copied_in_is_no_victim_and_will_run(self) -> None:
        views = [NEEDY, runs("b", copying=True), pauses("slow", stalled=False)]
        decision = schedule(snapshot(*views), CONFIG)
        assert (decision.preempt, decision.swap_out, decision.chunks) == ((), (), ())
        assert decision.sitting_out == (key("a"),)

    def test_stalled_clients_give_way_first_the_longest_stalled_of_them(self) -> None:
        tickets = (TicketView("t", 2, False),)
        views = [
            NEEDY,
            runs("b"),
            pauses("s1", last_step=5, swap_blocks=1),
            pauses("s2", last_step=3, swap_blocks=1),
            pauses("s3", last_step=1, shared=(5, 6)),  # nothing would come free
        ]
        decision = schedule(snapshot(*views, tickets=tickets), CONFIG)
        assert (decision.swap_out, decision.revoke, decision.preempt) == ((key("s2"),), (), ())

    def test_room_is_made_for_one_that_waits(self) -> None:
        views = [pauses("s1", last_step=2), pauses("s2", last_step=1, swap_blocks=2), waits("w", 60)]
        decision = schedule(snapshot(*views), CONFIG)
        assert (decision.preempt, decision.swap_out) == ((key("s1"),), (key("s2"),)), "it needs the blocks of both"
        assert decision.admitted == ()
        decision = schedule(snapshot(*views, free=2), CONFIG)
        assert (decision.preempt, decision.swap_out) == ((), (key("s2"),)), "one of them is enough"
        arriving = waits("s2", copying=True, leaving_blocks=2, has_credit=False)
        decision = schedule(snapshot(views[0], arriving, views[2], free=2), CONFIG)
        assert (decision.preempt, decision.swap_out) == ((), ()), "and is waited for"

    def test_no_room_is_made_if_it_does_not_help(self) -> None:
        views = [pauses("s1"), runs("b"), waits("w", 90)]
        assert schedule(snapshot(*views), CONFIG).preempt == ()

    def test_room_is_made_for_a_ticket_that_was_refused(self) -> None:
        views = [pauses("s1", last_step=2), pauses("s2", last_step=1)]
        assert schedule(snapshot(*views, wanted=2), CONFIG).preempt == (key("s2"),)
        assert schedule(snapshot(*views), CONFIG).preempt == ()


class TestComingBack:
    def test_it_is_copied_in_and_does_not_run_yet(self) -> None:
        swapped = waits("s", 20, computed=19, restores=True, preempted=True)
        decision = schedule(snapshot(swapped, waits("w", 20), free=10), CONFIG)
        assert (decision.swap_in, decision.admitted) == ((key("s"),), (key("w"),))
        assert [chunk.key for chunk in decision.chunks] == [key("w")]

    def test_it_needs_head_room_if_it_can_come_to_need_it(self) -> None:
        swapped = waits("s", 20, computed=19, restores=True, preempted=True)
        assert schedule(snapshot(swapped, free=2), CONFIG).swap_in == ()
        assert schedule(snapshot(swapped, free=2 + HEADROOM_BLOCKS), CONFIG).swap_in == (key("s"),)
        assert schedule(snapshot(swapped._replace(max_blocks=2), free=2), CONFIG).swap_in == (key("s"),)
        assert schedule(snapshot(waits("w"), free=2), CONFIG).admitted == (key("w"),), "others need none"
        dropped = waits("d", preempted=True)
        assert schedule(snapshot(dropped, free=2), CONFIG).admitted == ()

    def test_head_room_never_exceeds_what_an_empty_pool_has(self) -> None:
        view = waits("s", 20, preempted=True, max_blocks=2)
        assert headroom(view) + view.admit_blocks <= view.max_blocks

    def test_a_full_budget_does_not_stop_it_but_a_lack_of_places_does(self) -> None:
        swapped = waits("s", 20, computed=19, restores=True)
        config = SchedulerConfig(max_num_batched_tokens=2, max_num_seqs=2, prefill_chunk_tokens=48)
        assert schedule(snapshot(runs("a"), swapped, free=9), config).swap_in == (key("s"),)
        assert schedule(snapshot(runs("a"), runs("b"), swapped, free=9), config).swap_in == ()

    def test_one_on_its_way_in_has_a_place_and_a_block_of_growth(self) -> None:
        arriving = runs("s", copying=True)
        config = SchedulerConfig(max_num_batched_tokens=2, max_num_seqs=2, prefill_chunk_tokens=48)
        assert schedule(snapshot(arriving, waits("w"), free=2), config).admitted == ()
        assert schedule(snapshot(arriving, waits("w"), free=3), config).admitted == (key("w"),)
        assert schedule(snapshot(runs("b"), arriving, waits("w"), free=9), config).admitted == ()


KINDS = st.sampled_from(["runs", "paused", "stalled", "arriving", "leaving", "waits"])


@given(
    before=st.lists(st.tuples(KINDS, st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 9)), max_size=4),
    after=st.lists(st.tuples(KINDS, st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 9)), max_size=5),
    tickets=st.booleans(),
)
def test_the_victim_is_the_one_that_a_ranking_of_all_gives(before, after, tickets) -> None:  # type: ignore[no-untyped-def]
    """Every sequence gets a rank by the rules; the best rank is the victim."""
    views, kinds = [], []
    crowd = [*before, ("needy", False, True, 0, 0), *after]
    for i, (kind, protected, preemptible, shared, last) in enumerate(crowd):
        more = {"preempted": protected, "preemptible": preemptible, "shared": tuple(range(shared)), "last_step": last}
        make = {
            "needy": lambda n, m: NEEDY._replace(key=key(n)),
            "runs": lambda n, m: runs(n, **m),
            "paused": lambda n, m: pauses(n, stalled=False, **m),
            "stalled": lambda n, m: pauses(n, **(m | {"preemptible": True})),
            "arriving": lambda n, m: runs(n, copying=True, **m),
            "leaving": lambda n, m: waits(n, copying=True, leaving_blocks=0),
            "waits": lambda n, m: waits(n),
        }[kind]
        views.append(make(str(i), more))
        kinds.append(kind)
    position = len(before)
    others_will_run = any(
        kind in ("runs", "arriving") and view.preemptible for kind, view in zip(kinds, views, strict=True)
    )
    ranked = []
    for i, (kind, view) in enumerate(zip(kinds, views, strict=True)):
        if kind == "stalled" and len(view.shared) < view.blocks:
            ranked.append((0, view.last_step, i))
        elif tickets or not view.preemptible:
            continue
        elif kind == "runs" and i > position and not view.preempted:
            ranked.append((1, -i, i))
        elif kind in ("paused", "stalled") and not others_will_run:
            ranked.append((2, -i, i))
    shot = snapshot(*views, tickets=(TicketView("t", 1, False),) if tickets else ())
    victim = Shortage(shot).victim_for(views[position])
    assert victim == (views[min(ranked)[2]] if ranked else None)
