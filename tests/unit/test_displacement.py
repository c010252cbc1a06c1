"""Who gives way to interactive requests, and who does not; against an oracle that plays it through block by block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.displacement import displace, kept_batch, standing_claim, yielding
from engine.preemption import headroom
from engine.scheduler import MAX_PASSED_OVER, ClaimView, SchedulerSnapshot, SequenceView, schedule
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


def sharing(views: list[SequenceView], free: int, holders: dict[int, int]) -> list[str]:
    shot = SchedulerSnapshot(tuple(views), (), free, BLOCK, holders=holders)
    return [view.key.request_id for view in displace(shot, CONFIG)]


def test_what_they_share_among_themselves_comes_free_with_the_last_of_them() -> None:
    """The oldest one stays: what it holds does not come free, nor what somebody else holds who is no sequence."""
    old, urgent = running("b0", BATCH), waiting("i", INTERACTIVE)
    batch = [old, *(running(f"b{i}", BATCH, shared=(5, 6)) for i in (1, 2))]
    assert sharing([*batch, urgent], 0, {5: 2, 6: 2}) == ["b2", "b1"]
    assert sharing([*batch, urgent], 0, {5: 3, 6: 2}) == []
    assert sharing([*batch, urgent], 1, {5: 3, 6: 2}) == ["b2", "b1"]
    assert sharing([old._replace(shared=(5, 6)), *batch[1:], urgent], 0, {5: 3, 6: 3}) == []


def test_who_would_free_nothing_is_left_alone() -> None:
    batch = [running("b0", BATCH, shared=(5, 6)), running("b1", BATCH), running("b2", BATCH, shared=(5, 6))]
    assert sharing([*batch, waiting("i", INTERACTIVE)], 0, {5: 2, 6: 2}) == ["b1"]


def test_one_large_one_gives_way_and_not_small_ones_beside_it() -> None:
    batch = [running("b0", BATCH), running("b1", BATCH, blocks=4), running("b2", BATCH, blocks=1)]
    assert names([*batch, waiting("i", INTERACTIVE, blocks=4)], free=0) == ["b1"]


def test_what_it_has_in_the_prefix_cache_is_no_gain() -> None:
    """Three of the blocks that would come free are its own beginning: it would hold them itself."""
    urgent = waiting("i", INTERACTIVE, blocks=5)._replace(computed=16, cached_blocks=1, used=(7,))
    batch = [running("b0", BATCH), running("b1", BATCH, shared=(7,)), running("b2", BATCH, shared=(7,))]
    assert sharing([*batch, urgent], 3, {7: 2}) == ["b2"]
    assert sharing([*batch, urgent], 2, {7: 2}) == ["b2", "b1"]
    assert sharing([*batch, urgent], 1, {7: 2}) == [], "a third one would be the beginning itself"
    claim = SchedulerSnapshot((*batch,), (), 1, BLOCK, claims=(ClaimView(4, (7,)),), holders={7: 2})
    assert displace(claim, CONFIG) == []
    assert standing_claim(claim, CONFIG) == 0
    assert [view.key.request_id for view in displace(replace(claim, free_blocks=2), CONFIG)] == ["b2", "b1"]
    assert standing_claim(replace(claim, free_blocks=2), CONFIG) == 4


def test_what_is_being_copied_out_together_is_on_its_way_back() -> None:
    leaving = [waiting(f"s{i}", BATCH)._replace(copying=True, leaving_blocks=3, shared=(5, 6)) for i in range(2)]
    views = [running("b0", BATCH), running("b1", BATCH), *leaving]
    assert sharing([*views, waiting("i", INTERACTIVE, blocks=4)], 0, {5: 2, 6: 2}) == []
    assert sharing([*views, waiting("i", INTERACTIVE, blocks=4)], 0, {5: 3, 6: 2}) == ["b1"]


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
    return SchedulerSnapshot(tuple(views), (), free, BLOCK, claims=(ClaimView(claim),))


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
    assert gone == [view for view in batch[::-1] if view in gone]
    assert len(batch) - len(gone) >= min(len(batch), kept_batch(config))
    assert list(schedule(shot, config).preempt[: len(gone)]) == [view.key for view in gone]

    def after(victims: list[SequenceView]) -> int:
        """How many interactive ones are admitted in the next step."""
        freed = free + sum(victim.blocks for victim in victims)
        left = [view._replace(blocks=0, computed=0) if view in victims else view for view in views]
        decision = schedule(SchedulerSnapshot(tuple(left), (), freed, BLOCK), config)
        kinds = {view.key: view.priority for view in views}
        return sum(kinds[name] is INTERACTIVE for name in decision.admitted)

    for one in gone:
        assert after(gone) > after([view for view in gone if view is not one])


@dataclass
class World:
    """Who holds which blocks. `free` are those that nobody has; numbers from 100 on are blocks of one's own.

    `hits`: cached blocks that a request or a claim (by its number) would begin with, which others hold.
    """

    views: list[SequenceView]
    held: dict[str, set[int]]
    hits: dict[str | int, set[int]]
    claims: list[int]
    free: int
    outside: set[int] = field(default_factory=set)  # held by those that are no sequences of the snapshot

    def snapshot(self) -> SchedulerSnapshot:
        blocks = {block for held in self.held.values() for block in held}
        count = {b: sum(b in held for held in self.held.values()) + (b in self.outside) for b in blocks}
        wanted = set().union(*self.hits.values()) if self.hits else set()
        views = []
        for view in self.views:
            name = view.key.request_id
            shared = sorted(b for b in self.held.get(name, ()) if count[b] > 1 or b in wanted)
            used = tuple(sorted(self.hits.get(name, ())))
            views.append(view._replace(shared=tuple(shared), used=used, cached_blocks=len(used)))
        claims = [ClaimView(n - len(self.hits[i]), tuple(sorted(self.hits[i]))) for i, n in enumerate(self.claims)]
        holders = {block: count[block] for view in views for block in view.shared}
        return SchedulerSnapshot(tuple(views), (), self.free, BLOCK, claims=tuple(claims), holders=holders)

    def served(self, gone: list[SequenceView], places: int, steps: int = 2) -> tuple[int, int]:
        """How many claims and how many waiting requests are served, in their order, in the step after the one in
        which these have given way; or in that one (`steps` 1)."""
        away = {view.key.request_id for view in gone} | {v.key.request_id for v in self.views if v.leaving_blocks}
        held: list[set[int]] = [blocks for name, blocks in self.held.items() if name not in away] + [self.outside]
        lost = set().union(*(blocks for name, blocks in self.held.items() if name in away)) if away else set()
        free = self.free + len(lost - set().union(*held))
        for view in self.views:
            if view.may_grow and view.key.request_id not in away:
                free -= growth(view, steps)
        places -= sum(bool(view.blocks and view.has_credit) for view in self.views if view.key.request_id not in away)
        counts = [0, 0]
        for i, blocks in enumerate(self.claims):
            cost = blocks - len(self.hits[i] & set().union(*held))
            if cost > free:
                break
            free -= cost
            held.append(self.hits[i])
            counts[0] += 1
        for view in self.views:
            name = view.key.request_id
            if view.blocks or view.copying or view.priority is not INTERACTIVE:
                continue
            cost = view.admit_blocks - len(self.hits[name] & set().union(*held))
            if cost + headroom(view) > free or places < 1:
                break
            free -= cost + (view.admit_blocks < view.max_blocks)
            places -= 1
            held.append(self.hits[name])
            counts[1] += 1
        return counts[0], counts[1]


def growth(view: SequenceView, steps: int) -> int:
    """Blocks that a decode takes in so many steps, and the one that is kept for it in the last of them."""
    blocks = before = view.blocks
    for number in range(steps):
        before = blocks
        blocks += view.known + number > blocks * BLOCK and blocks < view.max_blocks
    return blocks - view.blocks + (before < view.max_blocks)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    few = st.sets(st.integers(0, 5), max_size=4)
    views, held, hits = [], {}, {}
    for number in range(draw(st.integers(0, 7))):
        name, priority = f"r{number}", draw(st.sampled_from([BATCH, BATCH, BATCH, STANDARD]))
        own = draw(st.integers(0, 2))
        held[name] = draw(few) | set(range(100 + 10 * number, 100 + 10 * number + own))
        if not held[name]:
            held[name] = {100 + 10 * number}
        if draw(st.integers(0, 7)) == 0:
            view = waiting(name, priority)._replace(copying=True, leaving_blocks=len(held[name]))
        else:
            view = running(name, priority, blocks=len(held[name]), has_credit=draw(st.integers(0, 5)) > 0)
            ends = draw(st.integers(-1, 1))
            known = view.blocks * BLOCK + ends
            grown = view.blocks + draw(st.integers(ends > 0, 2))
            view = view._replace(known=known, computed=known - 1, max_blocks=grown)
        views.append(view._replace(arrival=number))
    there = sorted(set().union(*held.values())) if held else []
    some = st.sets(st.sampled_from(there), max_size=3) if there else st.just(set())
    for number in range(draw(st.integers(0, 3))):
        name, more = f"i{number}", draw(st.integers(1, 4))
        hits[name] = draw(some)
        view = waiting(name, INTERACTIVE, blocks=len(hits[name]) + more)
        view = view._replace(max_blocks=view.admit_blocks + draw(st.integers(0, 1)), preempted=draw(st.booleans()))
        views.append(view._replace(arrival=10 + number))
    claims = []
    for number in range(draw(st.integers(0, 2))):
        hits[number] = draw(some)
        claims.append(len(hits[number]) + draw(st.integers(1, 4)))
    return World(views, held, hits, claims, draw(st.integers(0, 5)), draw(few))


@settings(max_examples=150, deadline=None)
@given(world=worlds(), share=st.sampled_from([0.0, 0.25]), at_once=st.integers(1, 8))
def test_as_many_are_served_as_can_be_and_nobody_gives_way_in_vain(world: World, share: float, at_once: int) -> None:
    config = SchedulerConfig(64, at_once, 48, queue=QueueConfig("priority", batch_share=share))
    shot = world.snapshot()
    willing, gone = yielding(shot.sequences, config), displace(shot, config)
    assert gone == [view for view in willing if view in gone]
    most = world.served(willing, at_once)
    at_last = most > world.served([], at_once, steps=1)
    assert bool(gone) <= at_last, "it can be served as things are"
    if at_last:
        assert world.served(gone, at_once) == most
    for one in gone:
        assert world.served([view for view in gone if view is not one], at_once) < most
    assert standing_claim(shot, config) == sum(claim.blocks for claim in shot.claims[: most[0]])
    assert standing_claim(shot, config, 1) == sum(claim.blocks for claim in shot.claims[: min(most[0], 1)])
