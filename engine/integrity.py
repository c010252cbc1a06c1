"""What holds of an engine's state between two calls of its public methods, as assertions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.blocks import BlockManager, Owner, OwnerKind
from engine.plan import TokenOut
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceState
from engine.swap import SwapSpace
from engine.ticket import Ticket
from pdcore.types import RequestKey


def check_engine(
    sequences: Mapping[RequestKey, EngineSequence],
    tickets: Mapping[str, Ticket],
    blocks: BlockManager,
    swap: SwapSpace,
    *,
    deferred: Sequence[Owner],
    flying: Collection[RequestKey],
    echoes: Sequence[TokenOut],
) -> None:
    """Assert that the parts agree.

    Args:
        deferred: owners that are freed when the step in flight has ended. flying: sequences of that step.
        echoes: first tokens of commits that are still to be reported.
    """
    blocks.check_integrity()
    swap.check_integrity(sequences)
    for key, sequence in sequences.items():
        _check_sequence(sequence, blocks)
        assert not blocks.blocks_of(Owner.send(key)), key
    assert len(set(deferred)) == len(deferred), deferred
    for owner in deferred:
        assert owner.id in flying, f"{owner} is deferred without a step that writes it"
        assert owner.id not in sequences, owner
        assert blocks.blocks_of(owner), f"{owner} is deferred and owns nothing"
    for owner in blocks.owners(OwnerKind.SEQUENCE):
        assert owner.id in sequences or owner in deferred, f"{owner} is unknown"
    held = [owner.id for owner in blocks.owners(OwnerKind.TICKET)]
    assert held == list(tickets), "a ticket without blocks, or blocks without a ticket"
    for echo in echoes:
        assert echo.key in sequences or echo.finish is not None, echo


def _check_sequence(sequence: EngineSequence, blocks: BlockManager) -> None:
    where = f"{sequence.key} {sequence.state}"
    owned = blocks.blocks_of(Owner.sequence(sequence.key))
    assert sequence.block_ids == tuple(owned), f"{where}: block table differs from the blocks owned"
    assert 0 <= sequence.num_computed < sequence.num_tokens, where
    assert len(owned) <= sequence.max_blocks, where
    assert sequence.num_published * blocks.block_size <= sequence.num_computed, where
    to_write = owned[sequence.num_computed // blocks.block_size :]
    assert all(blocks.is_private(block) for block in to_write), f"{where}: would write a block that others use"
    assert 0 <= sequence.credit <= sequence.spec.token_window, where
    assert sequence.state not in (SequenceState.FINISHED, SequenceState.ABORTED), where
    assert (sequence.state is SequenceState.PAUSED) == (sequence.credit == 0 and bool(owned)), where
    assert (sequence.state is SequenceState.SWAPPED) == (sequence.phase is not None), where
    if sequence.state is SequenceState.SWAPPED:
        assert not owned, f"{where}: its blocks are those of the copy"
        assert sequence.host_from * blocks.block_size < sequence.num_computed, where
        return
    assert sequence.num_computed <= len(owned) * blocks.block_size, where
    assert owned or sequence.state is SequenceState.WAITING, where
