"""Who gives way to interactive requests, and who does not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.displacement import displace, kept_batch, standing_claim
from engine.scheduler import MAX_PASSED_OVER, SchedulerSnapshot, SequenceView, schedule
from pdcore.config import QueueConfig, SchedulerConfig
from pdcore.types import PriorityClass, RequestKey

BLOCK = 16
INTERACTIVE, STANDARD, BATCH = PriorityClass
CONFIG = SchedulerConfig(64, 4, 48, queue=QueueConfig("priority", batch_share=0.25))


def running(name: str, priority: PriorityClass, *, blocks: int = 2, **more: object) -> SequenceView:
    known = blocks * BLOCK - 2
    view = SequenceView(RequestKey(name, 0), known, known - 1, blocks, blocks, blocks, True, True, 0, 0)
    fields = {"yields": priority is BATCH, **more}
    return view._replace(priority=priority, **fields)  # type: ignore[arg-type]


def waiting(name: str, priority: PriorityClass, *, blocks: int = 2) -> SequenceView:
    view = SequenceView(RequestKey(name, 0), 20, 0, 0, blocks, blocks, True, True, 0, 0)
    return view._replace(priority=priority)


def names(views: list[SequenceView], free: int, config: SchedulerConfig = CONFIG) -> list[str]:
    return [view.key.request_id for view in displace(SchedulerSnapshot(tuple(views), (), free, BLOCK), config)]


FULL = [running("b0", BATCH), running("b1", BATCH), running("s", STANDARD), running("b2", BATCH)]


def test_the_youngest_batch_request_gives_its_place() -> None:
    assert names([*FULL, waiting("i", INTERACTIVE)], free=9) == ["b2"]


def test_only_interactive_ones_displace_and_only_batch_ones_are_displaced() -> None:
    assert names([*FULL, waiting("s2", STANDARD), waiting("b3", BATCH)], free=9) == []
    standard = [running(str(i), STANDARD) for i in range(4)]
    assert names([*standard, waiting("i", INTERACTIVE)], free=9) == []


def test_with_a_place_and_blocks_nobody_is_displaced() -> None:
    assert names([*FULL[:3], waiting("i", INTERACTIVE)], free=2) == []


def test_blocks_are_taken_until_it_fits() -> None:
    batch = [running(f"b{i}", BATCH) for i in range(3)]
    assert names([*batch, waiting("i", INTERACTIVE, blocks=4)], free=0) == ["b2", "b1"]
    assert names([*batch, waiting("i", INTERACTIVE, blocks=3)], free=1) == ["b2"]


def test_nothing_is_taken_for_nothing() -> None:
    """The oldest batch request stays, so there is no room for five blocks whatever happens."""
    batch = [running(f"b{i}", BATCH) for i in range(3)]
    assert names([*batch, waiting("i", INTERACTIVE, blocks=5)], free=0) == []


def test_blocks_that_others_hold_too_do_not_help() -> None:
    batch = [running(f"b{i}", BATCH, shared_blocks=2) for i in range(3)]
    assert names([*batch, waiting("i", INTERACTIVE)], free=0) == []


def test_batch_keeps_its_share() -> None:
    assert kept_batch(CONFIG) == 1
    many = [waiting(f"i{n}", INTERACTIVE) for n in range(5)]
    batch = [running(f"b{i}", BATCH) for i in range(4)]
    assert names([*batch, *many], free=20) == ["b3", "b2", "b1"]
    none = replace(CONFIG, queue=QueueConfig("priority", batch_share=0.0))
    assert names([*batch, *many], free=20, config=none) == ["b3", "b2", "b1", "b0"]


def test_who_has_just_come_back_is_left_alone() -> None:
    views = [running("b0", BATCH), running("b1", BATCH), running("s", STANDARD), running("b2", BATCH, yields=False)]
    assert names([*views, waiting("i", INTERACTIVE)], free=9) == ["b1"]


def test_other_policies_displace_nobody() -> None:
    config = replace(CONFIG, queue=QueueConfig("fcfs"))
    assert names([*FULL, waiting("i", INTERACTIVE)], free=9, config=config) == []


def claimed(views: list[SequenceView], free: int, claim: int) -> SchedulerSnapshot:
    return SchedulerSnapshot(tuple(views), (), free, BLOCK, claims=(claim,))


def test_a_ticket_that_was_refused_displaces_too() -> None:
    gone = [view.key.request_id for view in displace(claimed(FULL, 1, 4), CONFIG)]
    assert gone == ["b2", "b1"]
    # Its blocks and those of the one that waits.
    both = displace(claimed([*FULL, waiting("i", INTERACTIVE, blocks=1)], 0, 2), CONFIG)
    assert [view.key.request_id for view in both] == ["b2", "b1"]


def test_a_claim_that_cannot_be_met_changes_nothing() -> None:
    """The oldest batch request keeps its place: there are four blocks to be had, and no fifth."""
    shot = claimed(FULL[:3], 2, 5)
    assert standing_claim(shot, CONFIG) == 0
    assert displace(shot, CONFIG) == []
    other = replace(CONFIG, queue=QueueConfig("fcfs"))
    assert standing_claim(claimed(FULL, 4, 1), other) == 0


def test_what_is_claimed_is_kept_from_others_but_not_from_interactive_ones_and_not_for_ever() -> None:
    def admitted(view: SequenceView) -> bool:
        return bool(schedule(claimed([running("s", STANDARD), view], 5, 4), CONFIG).admitted)

    assert not admitted(waiting("b", BATCH))
    assert not admitted(waiting("s2", STANDARD))
    assert admitted(waiting("i", INTERACTIVE))
    assert admitted(waiting("s2", STANDARD)._replace(passed_over=MAX_PASSED_OVER))


@given(
    holders=st.lists(st.tuples(st.sampled_from(PriorityClass), st.integers(1, 4)), max_size=8),
    free=st.integers(0, 8),
    claim=st.integers(1, 12),
)
def test_a_claim_is_met_by_as_few_as_possible_or_by_none(holders, free, claim) -> None:  # type: ignore[no-untyped-def]
    views = [running(f"r{i}", priority, blocks=n, arrival=i) for i, (priority, n) in enumerate(holders)]
    batch = [view for view in views if view.priority is BATCH][kept_batch(CONFIG) :][::-1]
    gone = displace(claimed(views, free, claim), CONFIG)
    enough = [k for k in range(len(batch) + 1) if free + sum(view.blocks for view in batch[:k]) >= claim]
    assert gone == batch[: enough[0] if enough else 0]


CLASSES = st.sampled_from(PriorityClass)


@given(
    holders=st.lists(st.tuples(CLASSES, st.integers(1, 4)), max_size=8),
    queue=st.lists(st.tuples(CLASSES, st.integers(1, 6)), max_size=5),
    free=st.integers(0, 8),
    share=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_those_it_was_for_are_admitted_next_and_no_fewer_would_have_done(holders, queue, free, share) -> None:  # type: ignore[no-untyped-def]
    config = SchedulerConfig(64, 6, 48, queue=QueueConfig("priority", batch_share=share))
    views = [running(f"r{i}", priority, blocks=n, arrival=i) for i, (priority, n) in enumerate(holders)]
    views += [waiting(f"w{i}", priority, blocks=n)._replace(arrival=10 + i) for i, (priority, n) in enumerate(queue)]
    shot = SchedulerSnapshot(tuple(views), (), free, BLOCK)
    gone = displace(shot, config)
    batch = [view for view in views if view.blocks and view.priority is BATCH]
    assert gone == batch[::-1][: len(gone)]
    assert len(batch) - len(gone) >= min(len(batch), kept_batch(config))
    assert list(schedule(shot, config).preempt[: len(gone)]) == [view.key for view in gone]

    def after(victims: list[SequenceView]) -> int:
        """How many interactive ones are admitted in the next step."""
        freed = free + sum(victim.blocks for victim in victims)
        left = [view._replace(blocks=0, computed=0) if view in victims else view for view in views]
        decision = schedule(SchedulerSnapshot(tuple(left), (), freed, BLOCK), config)
        kinds = {view.key: view.priority for view in views}
        return sum(kinds[name] is INTERACTIVE for name in decision.admitted)

    if gone:
        assert after(gone) > after(gone[:-1])
