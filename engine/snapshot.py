"""What a decision of the scheduler depends on, taken from an engine's state. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from engine.blocks import BlockManager, Owner
from engine.scheduler import SchedulerSnapshot, SequenceView, TicketView
from engine.sequence import Sequence, SequenceKind
from engine.ticket import Ticket
from pdcore.queueing import QueueBook
from pdcore.step_time import StepTime
from pdcore.types import PriorityClass, RequestKey


def take_snapshot(
    sequences: Mapping[RequestKey, Sequence],
    tickets: Mapping[str, Ticket],
    blocks: BlockManager,
    book: QueueBook,
    *,
    step_time: StepTime,
    max_num_seqs: int,
) -> SchedulerSnapshot:
    """The state as the scheduler sees it. Looks up in the prefix cache what it has of each waiting sequence, and
    notes the answer in ``Sequence.hits``."""
    # Each sequence takes one block of growth in a step at most: nobody is preempted while there are as many, unless
    # for interactive ones.
    short = blocks.free < len(sequences) or any(
        sequence.num_blocks == 0 and sequence.spec.priority is PriorityClass.INTERACTIVE
        for sequence in sequences.values()
    )
    views = tuple(_view(sequence, blocks, short) for sequence in sequences.values())
    waiting = [view.waiting for view in views if not view.blocks and view.has_credit]
    running = sum(view.blocks > 0 for view in views)
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
    )


def _view(sequence: Sequence, blocks: BlockManager, short: bool) -> SequenceView:
    computed, hits, used = sequence.num_computed, 0, 0
    if sequence.num_blocks == 0 and sequence.may_hit:
        names = sequence.name_blocks(sequence.may_hit)
        hits = sequence.hits = blocks.cache.match(names, sequence.may_hit, sequence.hits)
        used = blocks.used(blocks.cache.blocks(names, hits))
        computed = hits * blocks.block_size
    return SequenceView(
        key=sequence.key,
        known=sequence.num_tokens,
        computed=computed,
        blocks=sequence.num_blocks,
        admit_blocks=min(blocks.blocks_for(sequence.num_tokens + 1), sequence.max_blocks),
        max_blocks=sequence.max_blocks,
        has_credit=sequence.credit > 0,
        preemptible=sequence.kind is SequenceKind.GENERATE,
        passed_over=sequence.skipped,
        last_step=sequence.last_step,
        cached_blocks=hits,
        used_blocks=used,
        shared_blocks=blocks.shared(Owner.sequence(sequence.key)) if short else 0,
        arrival=sequence.arrival,
        tenant=sequence.spec.tenant,
        priority=sequence.spec.priority,
        again=sequence.chunks > 0,
        yields=may_yield(sequence),
    )


def may_yield(sequence: Sequence) -> bool:
    """Whether it is a batch request that may be preempted for an interactive one: one that has come further than
    when it was preempted last, so that it gets on."""
    gained = sequence.preempt_until == 0 or sequence.num_computed > sequence.preempt_until
    return sequence.spec.priority is PriorityClass.BATCH and sequence.kind is SequenceKind.GENERATE and gained


def queued_prefill_tokens(sequences: Mapping[RequestKey, Sequence], block_size: int) -> int:
    """Tokens to be computed before the next one can be sampled, over all sequences that lack more than one. What the
    prefix cache has of waiting ones is taken as of the last snapshot."""
    return sum(
        sequence.remaining - (0 if sequence.num_blocks else sequence.hits * block_size)
        for sequence in sequences.values()
        if sequence.is_prefilling
    )
