"""Several samples of one prompt: how its KV is shared out among their sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.blocks import BlockManager, Owner
from engine.sequence import Sequence
from engine.step import KvCache


def share_out(heir: Sequence, others: Seq[Sequence], blocks: BlockManager, cache: KvCache, *, own: int = 0) -> None:
    """`heir` has the KV of a prompt. Give all `others` the same: full blocks are shared, the rest of it is copied at
    once, for each of them is about to write there.

    Who gets no block for that, for want of free ones, waits for its turn and computes it again.

    Args:
        own: blocks for each of the others that its owner has behind those of its table.
    """
    source = Owner.sequence(heir.key)
    full, rest = divmod(heir.num_computed, blocks.block_size)
    for sequence in others:
        target = Owner.sequence(sequence.key)
        if rest and not own and not blocks.free:
            continue
        blocks.fork(source, target, full, own)
        if rest:
            if not own:
                blocks.allocate(target, 1)
            _copy_block(cache, blocks.blocks_of(source)[full], blocks.blocks_of(target)[full], rest)
        sequence.take_computed(blocks.blocks_of(target), heir.num_computed, min(heir.num_published, full))


def _copy_block(cache: KvCache, source: int, target: int, tokens: int) -> None:
    """Copy the first `tokens` tokens of a block, over all layers."""
    cache.scatter(0, [target], 0, cache.gather(0, cache.geometry.num_layers, [source], 0, tokens))
