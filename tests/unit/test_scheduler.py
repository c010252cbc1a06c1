"""Each rule of the scheduler, on snapshots made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import OLDEST_SHARE
from engine.displacement import displace
from engine.scheduler import (
    MAX_PASSED_OVER,
    PassedOver,
    ScheduledChunk,
    SchedulerSnapshot,
    SequenceView,
    TicketView,
    schedule,
    ticket_refusal,
)
from pdcore.config import QUEUE_POLICIES, QueueConfig, SchedulerConfig
from pdcore.queueing import QueueState
from pdcore.step_time import StepTime
from pdcore.types import PriorityClass, RequestKey

BLOCK = 16


def key(name: str) -> RequestKey:
    return RequestKey(name, 0)


def decode(name: str, known: int, *, blocks: int | None = None, **more: object) -> SequenceView:
    """A sequence that lacks one token; by default its blocks hold `known` tokens."""
    held = -(-known // BLOCK) if blocks is None else blocks
    view = SequenceView(key(name), known, known - 1, held, held, 100, True, True, 0, 0)
    return view._replace(**more)  # type: ignore[arg-type]


def prompt(name: str, known: int, *, computed: int = 0, admitted: bool = False, **more: object) -> SequenceView:
    """A prompt that waits, or that has blocks already."""
    needed = -(-(known + 1) // BLOCK)
    view = SequenceView(key(name), known, computed, needed if admitted else 0, needed, 100, True, True, 0, 0)
    return view._replace(**more)  # type: ignore[arg-type]


def snapshot(*views: SequenceView, free: int = 100, tickets: tuple[TicketView, ...] = ()) -> SchedulerSnapshot:
    return SchedulerSnapshot(views, tickets, free, BLOCK)


CONFIG = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, prefill_chunk_tokens=48)


def test_nothing_to_do() -> None:
    assert schedule(snapshot(), CONFIG).chunks == ()


def test_decodes_come_first_and_prefills_take_what_they_leave() -> None:
    decision = schedule(snapshot(prompt("p", 500), decode("a", 20), decode("b", 30)), CONFIG)
    assert decision.chunks == (
        ScheduledChunk(key("a"), 19, 1, 0),
        ScheduledChunk(key("b"), 29, 1, 0),
        ScheduledChunk(key("p"), 0, 48, 32),
    )
    assert decision.admitted == (key("p"),)


def test_decodes_never_wait_for_prefills_even_when_the_budget_is_tiny() -> None:
    config = SchedulerConfig(max_num_batched_tokens=3, max_num_seqs=3, prefill_chunk_tokens=48)
    decision = schedule(snapshot(prompt("p", 500, admitted=True), decode("a", 20), decode("b", 30)), config)
    assert decision.chunks == (
        ScheduledChunk(key("a"), 19, 1, 0),
        ScheduledChunk(key("b"), 29, 1, 0),
        ScheduledChunk(key("p"), 0, 1, 0),
    )


def test_one_token_chunks_come_first_also_if_they_are_the_rest_of_a_prompt() -> None:
    decision = schedule(
        snapshot(prompt("long", 40, admitted=True), prompt("rest", 30, computed=29, admitted=True)), CONFIG
    )
    assert [(chunk.key, chunk.num_tokens) for chunk in decision.chunks] == [(key("rest"), 1), (key("long"), 40)]


def test_a_chunk_may_end_inside_a_block() -> None:
    config = SchedulerConfig(max_num_batched_tokens=17, max_num_seqs=1, prefill_chunk_tokens=17)
    first = schedule(snapshot(prompt("p", 20)), config).chunks
    assert first == (ScheduledChunk(key("p"), 0, 17, 2),)
    second = schedule(snapshot(prompt("p", 20, computed=17, admitted=True)), config).chunks
    assert second == (ScheduledChunk(key("p"), 17, 3, 0),)


def test_max_num_seqs_bounds_admission() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, prefill_chunk_tokens=48)
    decision = schedule(snapshot(decode("a", 20), prompt("p", 4), prompt("q", 4)), config)
    assert decision.admitted == (key("p"),)


def test_who_waited_longest_goes_first_when_more_can_run_than_may() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, prefill_chunk_tokens=48)
    views = [decode("a", 20, last_step=9), decode("b", 20, last_step=8), prompt("p", 90, admitted=True, last_step=7)]
    decision = schedule(snapshot(*views), config)
    assert [chunk.key for chunk in decision.chunks] == [key("b"), key("p")]


def test_without_credit_nothing_runs_or_is_admitted() -> None:
    decision = schedule(snapshot(decode("a", 20, has_credit=False), prompt("p", 20, has_credit=False)), CONFIG)
    assert decision.chunks == ()


class TestGrowth:
    def test_a_decode_takes_a_block_when_its_last_one_is_full(self) -> None:
        decision = schedule(snapshot(decode("a", 17, blocks=1), free=1), CONFIG)
        assert decision.chunks == (ScheduledChunk(key("a"), 16, 1, 1),)

    def test_tickets_are_revoked_youngest_first_before_anyone_is_preempted(self) -> None:
        tickets = (TicketView("old", 3, False), TicketView("young", 1, False))
        views = [decode("a", 17, blocks=1), decode("b", 33, blocks=2), decode("c", 20)]
        decision = schedule(snapshot(*views, free=0, tickets=tickets), CONFIG)
        assert decision.revoke == ("young", "old")
        assert decision.preempt == ()
        assert decision.sitting_out == (key("a"), key("b"))
        assert [chunk.key for chunk in decision.chunks] == [key("c")]

    def test_no_more_tickets_are_revoked_than_are_wanted(self) -> None:
        tickets = (TicketView("old", 3, False), TicketView("young", 2, False))
        views = [decode("a", 17, blocks=1), decode("b", 33, blocks=2)]
        assert schedule(snapshot(*views, free=0, tickets=tickets), CONFIG).revoke == ("young",)

    def test_blocks_that_are_on_their_way_back_are_waited_for(self) -> None:
        tickets = (TicketView("old", 3, False), TicketView("young", 2, True))
        decision = schedule(snapshot(decode("a", 17, blocks=1), free=0, tickets=tickets), CONFIG)
        assert decision.revoke == ()
        assert decision.preempt == ()
        assert decision.sitting_out == (key("a"),)

    def test_the_youngest_is_preempted_and_the_oldest_served(self) -> None:
        views = [decode("a", 17, blocks=1), decode("b", 20), decode("c", 20)]
        decision = schedule(snapshot(*views, free=0), CONFIG)
        assert decision.preempt == (key("c"),)
        assert decision.chunks == (ScheduledChunk(key("a"), 16, 1, 1), ScheduledChunk(key("b"), 19, 1, 0))

    def test_a_block_given_to_a_younger_one_is_taken_back(self) -> None:
        # Turns are by waiting time: the younger one is first and takes the last block.
        config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, prefill_chunk_tokens=48)
        views = [
            decode("a", 17, blocks=1, last_step=5),
            decode("b", 20, last_step=6),
            decode("c", 17, blocks=1, last_step=4),
        ]
        decision = schedule(snapshot(*views, free=1), config)
        assert decision.preempt == (key("c"),)
        assert decision.chunks == (ScheduledChunk(key("a"), 16, 1, 1), ScheduledChunk(key("b"), 19, 1, 0))

    def test_the_block_taken_back_serves_the_next(self) -> None:
        config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, prefill_chunk_tokens=48)
        views = [
            decode("a", 17, blocks=1, last_step=5),
            decode("b", 17, blocks=1, last_step=6),
            decode("c", 17, blocks=1, last_step=4),
        ]
        decision = schedule(snapshot(*views, free=1), config)
        assert decision.preempt == (key("c"),)
        assert decision.chunks == (ScheduledChunk(key("a"), 16, 1, 1), ScheduledChunk(key("b"), 16, 1, 1))

    def test_the_youngest_itself_sits_out_while_older_ones_run(self) -> None:
        decision = schedule(snapshot(decode("a", 20), decode("b", 17, blocks=1), free=0), CONFIG)
        assert decision.preempt == ()
        assert decision.sitting_out == (key("b"),)
        assert [chunk.key for chunk in decision.chunks] == [key("a")]

    def test_who_sits_out_does_not_take_the_place_of_one_who_can_run(self) -> None:
        config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1, prefill_chunk_tokens=48)
        views = [decode("a", 20, last_step=9), decode("b", 17, blocks=1, last_step=3)]
        decision = schedule(snapshot(*views, free=0), config)
        assert [chunk.key for chunk in decision.chunks] == [key("a")]

    def test_paused_ones_keep_their_blocks_while_others_can_give_way(self) -> None:
        views = [decode("a", 17, blocks=1), decode("b", 20), decode("slow", 20, has_credit=False)]
        assert schedule(snapshot(*views, free=0), CONFIG).preempt == (key("b"),)

    def test_a_stalled_client_does_not_stop_the_only_one_that_can_run(self) -> None:
        views = [decode("slow", 20, has_credit=False), decode("a", 17, blocks=1)]
        decision = schedule(snapshot(*views, free=0), CONFIG)
        assert decision.preempt == (key("slow"),)
        assert [chunk.key for chunk in decision.chunks] == [key("a")]

    def test_prefill_sequences_are_never_preempted(self) -> None:
        views = [decode("a", 17, blocks=1), prompt("p", 40, admitted=True, preemptible=False)]
        decision = schedule(snapshot(*views, free=0), CONFIG)
        assert decision.preempt == ()
        assert decision.sitting_out == (key("a"),)
        assert [chunk.key for chunk in decision.chunks] == [key("p")]

    def test_blocks_that_others_hold_too_do_not_come_free(self) -> None:
        views = [decode("a", 17, blocks=1), decode("b", 20), decode("c", 20, shared=(5, 6))]
        decision = schedule(snapshot(*views, free=0), CONFIG)
        assert decision.preempt == (key("c"), key("b")), "the next one gives way too, until a block comes free"
        assert decision.chunks == (ScheduledChunk(key("a"), 16, 1, 1),)

    def test_a_decode_sits_out_if_those_that_gave_way_shared_all_they_had(self) -> None:
        """And still do, with somebody who is no sequence."""
        views = [decode("a", 17, blocks=1), decode("b", 20, shared=(5, 6)), decode("c", 20, shared=(5, 6))]
        decision = schedule(replace(snapshot(*views, free=0), holders={5: 3, 6: 3}), CONFIG)
        assert decision.preempt == (key("c"), key("b"))
        assert decision.sitting_out == (key("a"),)

    def test_what_they_shared_with_each_other_is_free_at_once(self) -> None:
        views = [decode("a", 17, blocks=1), decode("b", 20, shared=(5, 6)), decode("c", 20, shared=(5, 6))]
        views = [*views[:1], decode("z", 17, blocks=1), *views[1:]]
        decision = schedule(replace(snapshot(*views, free=0), holders={5: 2, 6: 2}), CONFIG)
        assert decision.preempt == (key("c"), key("b"))
        assert decision.sitting_out == ()
        assert [chunk.key for chunk in decision.chunks] == [key("a"), key("z")]

    def test_nothing_is_admitted_when_memory_is_short(self) -> None:
        views = [decode("a", 17, blocks=1), decode("b", 60), prompt("p", 4)]
        decision = schedule(snapshot(*views, free=0), CONFIG)
        assert decision.preempt == (key("b"),)
        assert decision.admitted == ()


class TestAdmission:
    def test_in_order_of_arrival(self) -> None:
        decision = schedule(snapshot(prompt("p", 20), prompt("q", 20), free=2), CONFIG)
        assert decision.admitted == (key("p"),)

    def test_leaves_a_block_of_growth_to_each_running_sequence(self) -> None:
        running = [decode("a", 20), decode("b", 20)]
        assert schedule(snapshot(*running, prompt("p", 20), free=3), CONFIG).admitted == ()
        assert schedule(snapshot(*running, prompt("p", 20), free=4), CONFIG).admitted == (key("p"),)

    def test_who_cannot_grow_needs_no_room(self) -> None:
        running = [decode("a", 20, max_blocks=2), prompt("s", 40, admitted=True, preemptible=False)]
        assert schedule(snapshot(*running, prompt("p", 20), free=2), CONFIG).admitted == (key("p"),)

    def test_a_large_one_is_passed_over_and_remembered(self) -> None:
        decision = schedule(snapshot(prompt("large", 400), prompt("p", 4), prompt("q", 4), free=10), CONFIG)
        assert decision.admitted == (key("p"), key("q"))
        assert decision.passed_over == (PassedOver(key("large"), 2),)

    def test_a_large_one_is_not_passed_over_for_ever(self) -> None:
        views = [prompt("large", 400, passed_over=MAX_PASSED_OVER - 1), prompt("p", 4), prompt("q", 4)]
        decision = schedule(snapshot(*views, free=10), CONFIG)
        assert decision.admitted == (key("p"),)
        views[0] = views[0]._replace(passed_over=MAX_PASSED_OVER)
        assert schedule(snapshot(*views, free=10), CONFIG).admitted == ()

    def test_who_gets_no_budget_takes_no_blocks(self) -> None:
        config = SchedulerConfig(max_num_batched_tokens=3, max_num_seqs=3, prefill_chunk_tokens=48)
        decision = schedule(snapshot(prompt("p", 40), prompt("q", 2), prompt("r", 30)), config)
        assert decision.chunks == (ScheduledChunk(key("p"), 0, 1, 3), ScheduledChunk(key("q"), 0, 2, 1))
        assert decision.admitted == (key("p"), key("q"))

    def test_what_the_prefix_cache_has_is_not_computed_again(self) -> None:
        waiting = prompt("p", 40, computed=32, cached_blocks=2)
        assert schedule(snapshot(waiting), CONFIG).chunks == (ScheduledChunk(key("p"), 32, 8, 1),)

    def test_cached_blocks_that_nobody_uses_cost_as_much_as_fresh_ones(self) -> None:
        waiting = prompt("p", 40, computed=32, cached_blocks=2)
        assert schedule(snapshot(waiting, free=2), CONFIG).chunks == ()
        assert schedule(snapshot(waiting, free=3), CONFIG).chunks != ()

    def test_cached_blocks_that_others_use_cost_nothing(self) -> None:
        waiting = prompt("p", 40, computed=32, cached_blocks=2, used=(3, 4))
        assert schedule(snapshot(waiting, free=1), CONFIG).chunks == (ScheduledChunk(key("p"), 32, 8, 1),)
        assert schedule(snapshot(waiting, free=0), CONFIG).chunks == ()

    def test_a_prompt_of_which_one_token_is_missing_comes_with_the_decodes(self) -> None:
        waiting = prompt("p", 33, computed=32, cached_blocks=2)
        chunks = schedule(snapshot(prompt("q", 20), waiting), CONFIG).chunks
        assert chunks == (ScheduledChunk(key("p"), 32, 1, 1), ScheduledChunk(key("q"), 0, 20, 2))


class TestPolicies:
    """Who is admitted first; the policies themselves are tested in test_queueing."""

    def admitted(self, views: list[SequenceView], policy: str) -> list[str]:
        config = SchedulerConfig(64, 1, 48, queue=QueueConfig(policy))
        state = QueueState(counters={"a": 100.0, "b": 5.0}, batch_end=0)
        shot = SchedulerSnapshot(tuple(views), (), 100, BLOCK, queue=state)
        return [name.request_id for name in schedule(shot, config).admitted]

    @pytest.mark.parametrize(
        ("policy", "first"), [("fcfs", "p"), ("sjf", "q"), ("fair", "r"), ("priority", "s"), ("static", "p")]
    )
    def test_each_has_its_own_first(self, policy: str, first: str) -> None:
        views = [
            prompt("p", 400, arrival=0, tenant="a"),
            prompt("q", 8, arrival=1, tenant="a"),
            prompt("r", 200, arrival=2, tenant="b"),
            prompt("s", 100, arrival=3, tenant="a", priority=PriorityClass.INTERACTIVE),
        ]
        assert self.admitted(views, policy) == [first]

    def test_what_is_cached_makes_a_prompt_short(self) -> None:
        cached = prompt("p", 400, computed=384, cached_blocks=24, arrival=1)
        assert self.admitted([prompt("q", 100), cached], "sjf") == ["p"]

    def test_nobody_enters_a_batch_that_is_complete(self) -> None:
        config = SchedulerConfig(64, 8, 48, queue=QueueConfig("static"))
        views = [decode("a", 20, arrival=0), prompt("p", 20, arrival=1), prompt("q", 20, arrival=2)]
        shot = SchedulerSnapshot(tuple(views), (), 100, BLOCK, queue=QueueState(batch_end=1))
        assert schedule(shot, config).admitted == (key("p"),)

    def test_the_tenant_that_has_had_least_gets_the_budget_first(self) -> None:
        config = SchedulerConfig(64, 8, 48, queue=QueueConfig("fair"))
        views = [
            prompt("old", 90, admitted=True, arrival=0, tenant="a"),
            prompt("p", 20, arrival=1, tenant="a"),
            prompt("q", 40, arrival=2, tenant="b"),
        ]
        shot = SchedulerSnapshot(tuple(views), (), 100, BLOCK, queue=QueueState(counters={"a": 9.0, "b": 5.0}))
        assert [(chunk.key, chunk.num_tokens) for chunk in schedule(shot, config).chunks] == [
            (key("old"), 64 // OLDEST_SHARE),
            (key("p"), 8),
            (key("q"), 40),
        ]


class TestPartialPrefills:
    CONFIG = SchedulerConfig(64, 8, 32, max_partial_prefills=2, long_prefill_tokens=100)

    def test_a_long_prompt_waits_without_blocks_while_another_is_computed(self) -> None:
        views = [prompt("long", 400, admitted=True), prompt("next", 400), prompt("short", 60)]
        decision = schedule(snapshot(*views), self.CONFIG)
        assert decision.admitted == (key("short"),)
        assert decision.passed_over == (), "what it waits for is no memory that others take"

    def test_a_waiting_long_prompt_keeps_nobody_from_a_place(self) -> None:
        config = replace(self.CONFIG, max_num_seqs=2)
        views = [prompt("long", 400, admitted=True), prompt("next", 400), prompt("short", 20)]
        assert schedule(snapshot(*views), config).admitted == (key("short"),)


class TestTimeTarget:
    TIMES = StepTime(base_ms=10.0, token_ms=1.0, steps=50, largest=1000)

    def test_prompts_get_what_the_target_leaves(self) -> None:
        config = replace(CONFIG, target_itl_ms=30.0)
        shot = replace(snapshot(decode("a", 20), prompt("p", 500)), step_time=self.TIMES)
        decision = schedule(shot, config)
        assert [chunk.num_tokens for chunk in decision.chunks] == [1, 19]
        assert decision.bound_by == "itl"

    def test_without_decodes_there_is_nobody_to_spare(self) -> None:
        config = replace(CONFIG, target_itl_ms=30.0)
        shot = replace(snapshot(prompt("p", 500)), step_time=self.TIMES)
        assert [chunk.num_tokens for chunk in schedule(shot, config).chunks] == [48]


class TestReasons:
    def test_nothing_held_it_back(self) -> None:
        assert schedule(snapshot(decode("a", 20), prompt("p", 20)), CONFIG).bound_by == ""

    def test_the_token_budget(self) -> None:
        assert schedule(snapshot(prompt("p", 40), prompt("q", 40)), CONFIG).bound_by == "tokens"

    def test_memory(self) -> None:
        assert schedule(snapshot(prompt("p", 40), free=1), CONFIG).bound_by == "memory"

    def test_places(self) -> None:
        config = SchedulerConfig(64, 1, 48)
        assert schedule(snapshot(decode("a", 20), prompt("p", 4)), config).bound_by == "seqs"


class TestTickets:
    def test_granted(self) -> None:
        assert ticket_refusal(snapshot(decode("a", 20), free=5), 4, 10) is None

    def test_growth_room(self) -> None:
        assert ticket_refusal(snapshot(decode("a", 20), decode("b", 20), free=5), 4, 10) is not None

    def test_reserved_fraction(self) -> None:
        tickets = (TicketView("t", 7, False),)
        assert ticket_refusal(snapshot(tickets=tickets), 3, 10) is None
        assert ticket_refusal(snapshot(tickets=tickets), 4, 10) is not None

    def test_a_held_prefix_counts_as_memory_and_not_as_reserved(self) -> None:
        tickets = (TicketView("t", 7, False),)
        assert ticket_refusal(snapshot(tickets=tickets, free=8), 3, 10, idle_blocks=5) is None
        assert ticket_refusal(snapshot(tickets=tickets, free=7), 3, 10, idle_blocks=5) is not None

    def test_blocks_are_kept_for_one_passed_over_too_often(self) -> None:
        starved = prompt("large", 400, passed_over=MAX_PASSED_OVER)
        assert ticket_refusal(snapshot(starved), 1, 10) is not None
        assert ticket_refusal(snapshot(starved._replace(has_credit=False)), 1, 10) is None


VIEWS = st.tuples(
    st.integers(1, 90),
    st.integers(0, 89),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.integers(0, MAX_PASSED_OVER),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["", "", "stalled", "preempted", "swapped", "copying"]),
    st.integers(0, 3),
)


@given(
    raw=st.lists(VIEWS, max_size=10),
    free=st.integers(0, 20),
    tickets=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=3),
    limits=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)),
    room=st.integers(0, 5),
    wanted=st.integers(0, 5),
    queue=st.builds(QueueConfig, policy=st.sampled_from(QUEUE_POLICIES), batch_share=st.sampled_from([0.0, 0.2])),
    classes=st.lists(st.sampled_from(PriorityClass), min_size=10, max_size=10),
    more=st.tuples(st.integers(0, 3), st.sampled_from([0.0, 12.0])),
    others_hold=st.lists(st.integers(0, 1), max_size=4),
)
def test_every_decision_can_be_carried_out(  # type: ignore[no-untyped-def]
    raw, free, tickets, limits, room, wanted, queue, classes, more, others_hold
) -> None:
    """Whatever the snapshot: blocks given are there, limits are kept, only what may be taken is taken."""
    views = []
    for i, (known, computed, blocks, credit, preemptible, passed, last, hits, shared, state, swap) in enumerate(raw):
        full = -(-(known + 1) // BLOCK)
        who = SequenceView(key(str(i)), known, 0, 0, full, full + 2, credit, preemptible, 0, last)
        if blocks == 0:
            hits = min(hits, (known - 1) // BLOCK)
            who = who._replace(
                passed_over=passed, computed=hits * BLOCK, cached_blocks=hits, used=tuple(range(min(hits, shared)))
            )
        elif computed >= known - 1 and preemptible:  # a decode, perhaps at the end of its last block
            held = -(-(known - 1) // BLOCK) or 1
            who = who._replace(computed=known - 1, blocks=held, shared=tuple(range(min(held, shared))))
        else:
            who = who._replace(computed=min(computed, known - 1), blocks=full, shared=tuple(range(min(full, shared))))
        if preemptible:
            who = who._replace(
                swap_blocks=swap if blocks else 0,
                stalled=state == "stalled" and blocks > 0 and not credit,
                preempted=state == "preempted",
                copying=state == "copying",
                leaving_blocks=swap + shared if state == "copying" and not blocks else 0,
                shared=tuple(range(shared)) if state == "copying" and not blocks else who.shared,
                restores=state == "swapped" and not blocks and known > 1,
            )
            if who.restores:
                who = who._replace(computed=known - 1)
        batch = classes[i] is PriorityClass.BATCH
        yields = batch and preemptible and not who.preempted and not who.copying
        views.append(who._replace(arrival=i, tenant="ab"[i % 2], priority=classes[i], yields=yields))
    shot = SchedulerSnapshot(
        tuple(views),
        tuple(TicketView(f"t{i}", n, revoking) for i, (n, revoking) in enumerate(tickets)),
        free,
        BLOCK,
        room,
        wanted,
        QueueState(batch_end=5),
        StepTime(5.0, 1.0, steps=9, largest=100),
        holders={
            block: others + sum(block in view.shared for view in views) for block, others in enumerate(others_hold)
        },
    )
    config = SchedulerConfig(
        max(limits[0], limits[1]),
        min(limits[0], limits[1]),
        limits[2],
        max_partial_prefills=more[0],
        long_prefill_tokens=30,
        target_itl_ms=more[1],
        queue=queue,
    )
    decision = schedule(shot, config)

    by_key = {view.key: view for view in views}
    assert sum(chunk.num_tokens for chunk in decision.chunks) <= config.max_num_batched_tokens
    assert len(decision.chunks) == len({chunk.key for chunk in decision.chunks}) <= config.max_num_seqs
    counts = [chunk.num_tokens for chunk in decision.chunks]
    assert sorted(counts, key=lambda n: n != 1) == counts
    gone = [by_key[victim] for victim in decision.preempt]
    back = sum(view.blocks - len(view.shared) for view in gone)
    # A block comes free at once if all its holders are dropped; a copy out holds what it copies.
    back += sum(sum(block in view.shared for view in gone) == n > 0 for block, n in shot.holders.items())
    pinned = sum(by_key[name].cached_blocks - len(by_key[name].used) for name in decision.admitted)
    swapped_in = sum(by_key[name].admit_cost for name in decision.swap_in)
    assert sum(chunk.new_blocks for chunk in decision.chunks) + pinned + swapped_in <= free + back
    assert sum(by_key[name].swap_blocks for name in decision.swap_out) <= room
    for chunk in decision.chunks:
        view = by_key[chunk.key]
        cached = view.cached_blocks if chunk.key in decision.admitted else 0
        assert view.has_credit
        assert not view.copying
        assert not view.restores
        assert chunk.key not in (*decision.preempt, *decision.swap_out)
        assert chunk.start == view.computed
        assert 1 <= chunk.num_tokens <= view.known - view.computed
        assert chunk.num_tokens == 1 or chunk.num_tokens <= config.prefill_chunk_tokens
        assert chunk.start + chunk.num_tokens <= (view.blocks + cached + chunk.new_blocks) * BLOCK
    displaced = {view.key for view in displace(shot, config)}
    victims = (*decision.preempt, *decision.swap_out)
    assert displaced <= set(victims)
    assert not victims or not decision.admitted or not displaced
    assert len(set(victims)) == len(victims)
    for victim in victims:
        view = by_key[victim]
        assert view.preemptible
        assert view.blocks
        assert not view.copying
        assert not (view.preempted and view.has_credit), "chosen again without progress"
        assert view.stalled or not tickets or victim in displaced
    for name in decision.swap_in:
        assert by_key[name].restores
        assert by_key[name].has_credit
    revocable = [ticket.owner for ticket in shot.tickets if not ticket.revoking]
    assert list(decision.revoke) == revocable[::-1][: len(decision.revoke)]
    # The oldest sequence that has blocks and credit is never preempted.
    runnable = [view for view in views if view.blocks and view.has_credit and view.preemptible and not view.copying]
    if runnable and not displaced:
        assert runnable[0].key not in victims
