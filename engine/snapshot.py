"""What a decision of the scheduler depends on, taken from an engine's state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.blocks import BlockManager, Owner
from engine.preemption import STALL_S, Loss, PreemptionTerms, expected_kept, swap_is_better
from engine.scheduler import ClaimView, SchedulerSnapshot, SequenceView, TicketView
from engine.sequence import Sequence, SequenceKind, SequenceState, SwapPhase
from engine.swap import front_left_behind
from engine.ticket import Ticket
from pdcore.queueing import QueueBook
from pdcore.step_time import StepTime
from pdcore.types import PriorityClass, RequestKey


def take_snapshot(
    sequences: Mapping[RequestKey, Sequence],
    tickets: Mapping[str, Ticket],
    blocks: BlockManager,
    *,
    book: QueueBook,
    step_time: StepTime,
    max_num_seqs: int,
    now: float = 0.0,
    terms: PreemptionTerms | None = None,
    swap_room: int = 0,
    wanted_blocks: int = 0,
    claims: tuple[ClaimView, ...] = (),
) -> SchedulerSnapshot:
    """The state as the scheduler sees it. Looks up in the prefix cache what it has of each waiting sequence, and
    notes the answer in ``Sequence.hits``.

    Args:
        book, max_num_seqs: of the queue, and how many may run at once. step_time: what steps take.
        now: on the engine's clock. terms: how sequences are preempted. swap_room, wanted_blocks, claims: see
            `SchedulerSnapshot`.
    """
    # Each sequence takes one block of growth in a step at most: nobody is preempted for growth while there are as
    # many; batch ones may be for interactive ones that wait.
    urgent = [sequence for sequence in sequences.values() if _is_urgent(sequence)]
    short = blocks.free < len(sequences) or bool(claims) or bool(urgent)
    demand = 0
    if short or any(sequence.state is SequenceState.PAUSED for sequence in sequences.values()):
        demand = wanted_blocks + sum(map(_demand, sequences.values()))
    wanted = {block for claim in claims for block in claim.used}
    for sequence in urgent:
        wanted.update(_look_up(sequence, blocks))
    pressure = _Pressure(short, demand, now, terms or PreemptionTerms(), frozenset(wanted))
    views = tuple(_view(sequence, blocks, pressure) for sequence in sequences.values())
    waiting = [view.waiting for view in views if not view.blocks and view.has_credit and not view.copying]
    running = sum(view.blocks > 0 or view.copying or view.restores for view in views)
    return SchedulerSnapshot(
        sequences=views,
        queue=book.look(waiting, running, max_num_seqs),
        step_time=step_time,
        tickets=tuple(
            TicketView(name, blocks.allocated(Owner.ticket(name)), ticket.revoking)
            for name, ticket in tickets.items()
        ),
        free_blocks=blocks.free,
        block_size=blocks.block_size,
        swap_room=swap_room,
        wanted_blocks=wanted_blocks,
        claims=claims,
        holders={block: blocks.holders(block) for view in views for block in view.shared},
    )


class _Pressure(NamedTuple):
    """What the views of all sequences depend on. `short`: some may be preempted for growth now. `demand`: blocks that
    they can all come to need beside those that they have, if any may be preempted at all. `wanted`: cached blocks
    that interactive requests which wait would take, and others use."""

    short: bool
    demand: int
    now: float
    terms: PreemptionTerms
    wanted: frozenset[int]


def _demand(sequence: Sequence) -> int:
    """Blocks that it can come to need beside those that it has, while its client takes tokens."""
    return sequence.max_blocks - sequence.num_blocks if sequence.credit > 0 else 0


def _is_urgent(sequence: Sequence) -> bool:
    """Whether others may have to give way to it, which waits for admission."""
    return sequence.num_blocks == 0 and sequence.spec.priority is PriorityClass.INTERACTIVE


def _look_up(sequence: Sequence, blocks: BlockManager) -> tuple[int, ...]:
    """Note in `hits` what the prefix cache has of a sequence without blocks, and return what others use of that."""
    if sequence.copying:
        return ()
    guess, sequence.hits = sequence.hits, 0
    if not sequence.may_hit or not (sequence.phase is None or sequence.exact):
        return ()
    names = sequence.name_blocks(sequence.may_hit)
    sequence.hits = blocks.cache.match(names, sequence.may_hit, guess)
    return tuple(blocks.used(blocks.cache.blocks(names, sequence.hits)))


def _view(sequence: Sequence, blocks: BlockManager, pressure: _Pressure) -> SequenceView:
    phase = sequence.phase
    copying = phase is SwapPhase.OUT or phase is SwapPhase.IN
    computed, hits, restores = sequence.num_computed, 0, False
    used: tuple[int, ...] = ()
    if sequence.num_blocks == 0 and not copying:
        used = _look_up(sequence, blocks)
        hits = sequence.hits
        # Of no use if the cache has more than was copied, or has lost what was left to it.
        restores = phase is SwapPhase.HOST and sequence.host_from <= hits
        restores = restores and hits * blocks.block_size < computed
        if not restores:
            computed = hits * blocks.block_size
    stalled = sequence.state is SequenceState.PAUSED and is_stalled(sequence, pressure.now)
    owner = Owner.sequence(sequence.key)
    held, swap_blocks, leaving = sequence.num_blocks, 0, 0
    shared: tuple[int, ...] = ()
    if held and (pressure.short or stalled):
        shared = blocks.shared(owner, pressure.wanted)
        swap_blocks = _swap_blocks(sequence, blocks, pressure)
    elif copying:
        owner = Owner.swap(sequence.key)
        count = len(blocks.blocks_of(owner))
        if phase is SwapPhase.OUT:
            leaving, shared = count, blocks.shared(owner, pressure.wanted)
        else:
            held = count
    return SequenceView(
        key=sequence.key,
        known=sequence.num_tokens,
        computed=computed,
        blocks=held,
        admit_blocks=min(blocks.blocks_for(sequence.num_tokens + 1), sequence.max_blocks),
        max_blocks=sequence.max_blocks,
        has_credit=sequence.credit > 0,
        preemptible=sequence.kind is SequenceKind.GENERATE,
        passed_over=sequence.skipped,
        last_step=sequence.last_step,
        cached_blocks=hits,
        used=used,
        shared=shared,
        swap_blocks=swap_blocks,
        stalled=stalled,
        preempted=sequence.preempted,
        copying=copying,
        leaving_blocks=leaving,
        restores=restores,
        arrival=sequence.arrival,
        tenant=sequence.spec.tenant,
        priority=sequence.spec.priority,
        # One that came by a ticket may have lost its blocks before it was in a step.
        again=sequence.chunks > 0 or sequence.preempted,
        yields=may_yield(sequence),
    )


def is_stalled(sequence: Sequence, now: float) -> bool:
    """Whether its client has taken nothing for `STALL_S`, or more; it may have lost its blocks for that already."""
    stalled = sequence.credit <= 0 and sequence.kind is SequenceKind.GENERATE
    return stalled and now - sequence.ran_at >= STALL_S


class StalledCount:
    """Sequences of stalled clients, and what would come free with them. Counted anew every quarter of `STALL_S`:
    there may be thousands, and every report has the numbers."""

    def __init__(self) -> None:
        self._next = float("-inf")
        self._seen = (0, 0)

    def look(self, sequences: Mapping[RequestKey, Sequence], blocks: BlockManager, now: float) -> tuple[int, int]:
        """How many there are, and their blocks that nobody else holds."""
        if now >= self._next:
            self._next = now + STALL_S / 4
            stalled = [sequence for sequence in sequences.values() if is_stalled(sequence, now)]
            held = blocks.freed_by(Owner.sequence(sequence.key) for sequence in stalled)
            self._seen = (len(stalled), held)
        return self._seen


def may_yield(sequence: Sequence) -> bool:
    """Whether it is a batch request that may be preempted for an interactive one: one that has a new token since it
    was preempted last, so that it gets on."""
    batch = sequence.spec.priority is PriorityClass.BATCH and sequence.kind is SequenceKind.GENERATE
    return batch and not sequence.preempted and not sequence.copying


def _swap_blocks(sequence: Sequence, blocks: BlockManager, pressure: _Pressure) -> int:
    """Blocks of host memory for the sequence if it is preempted; 0 if it is better dropped."""
    size, computed = blocks.block_size, sequence.num_computed
    shared = len(blocks.shared(Owner.sequence(sequence.key)))
    held = front_left_behind(sequence, blocks) * size
    cached = max(0, sequence.num_published - shared)
    kept = expected_kept(sequence.num_blocks - shared, cached, pressure.demand - _demand(sequence))
    loss = Loss(computed, held, min(kept * size, computed - held))
    return blocks.blocks_for(computed - held) if swap_is_better(loss, pressure.terms) else 0


def queued_prefill_tokens(sequences: Mapping[RequestKey, Sequence], block_size: int) -> int:
    """Tokens to be computed before the next one can be sampled, over all sequences that lack more than one. What the
    prefix cache has of waiting ones is taken as of the last snapshot."""
    return sum(
        sequence.remaining - (0 if sequence.num_blocks or sequence.phase else sequence.hits * block_size)
        for sequence in sequences.values()
        if sequence.is_prefilling
    )
