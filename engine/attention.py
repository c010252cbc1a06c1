"""Ragged attention over the paged cache, on CPU.

`plan_attention` turns the flat arrays of a step into groups of sequences once per step; `attend` runs one layer. The
layer loop then does a fixed, small number of tensor operations per group, whatever number of sequences is in it.

Where the arithmetic is float32 our own code does it, and reads the cache where it lies (`engine.native.attention` for
sequences that decode, `engine.native.prefill` for the others). Elsewhere K and V are gathered, and it is a matrix
product with the query heads of a KV head folded into the rows, softmax, and a second product. torch's
scaled_dot_product_attention is not used: `benchmarks/prefill_attention.py` has the two side by side.

A plan may have a window: a query at position p then sees only the keys at positions above ``p - window``. Blocks that
no query of a step sees are not read; they stay in the cache, for the prefix cache and for transfers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_cache import PagedKvCache
from engine.native.attention import DecodeKernel, decode_kernel
from engine.native.prefill import PrefillKernel, prefill_kernel
from engine.step import StepInput

_DECODE_KV_BYTES = 3 << 19  # gathered K and V of one decode group: about what a core's own cache holds
_SCORE_BYTES = 2 << 20  # scores of one query tile, likewise; bounds memory for any prompt length
_MIN_TILE, _MAX_TILE = 16, 256
_PADDING = 1.25  # padded work of a group may be this many times the real work


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, KV heads and head size. Query head h reads KV head ``h // (num_heads // num_kv_heads)``.

    Attributes:
        scale: factor of the scores; None is ``head_dim ** -0.5``.
        softcap: scores s become ``softcap * tanh(s / softcap)``; None leaves them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class _Context:
    """Where the K and V of g sequences are, padded to `length` tokens each.

    Attributes:
        blocks: int64 [2 * kv_heads * g * length / block_size]; rows of `PagedKvCache.blocks_of`.
        stale: int64 [n]; tokens, of the g * length, beyond a sequence's end within its last block. What an earlier
            owner of the block left there is set to zero after the gather: a masked infinity is not harmless.
    """

    num_seqs: int
    length: int
    blocks: torch.Tensor
    stale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one query token each. `rows`: their token rows. `mask`: [kv_heads * g, 1, length], added."""

    context: _Context
    rows: slice | torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """`queries` query tokens of each sequence of a prefill group.

    Attributes:
        rows: token rows, sequence by sequence, all of the same count (repeated ones are padding).
        first_key, keys: the queries see tokens [first_key, keys) of the context at most.
        mask: added to the scores of the last ``mask.shape[-1]`` keys; broadcasts over [g, head group, queries, keys].
        keep: which of the output rows are real, and the token rows that they belong to; None: all, in order.
    """

    queries: int
    rows: slice | torch.Tensor
    first_key: int
    keys: int
    mask: torch.Tensor
    keep: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class _PrefillGroup:
    """One long sequence in several tiles, or several short ones in a single tile."""

    context: _Context
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a step's tokens are attended to.

    Attributes:
        write_slots: int64 [T * 2 * kv_heads]; rows of `PagedKvCache.slots_of` for K and V.
        kernel: does all sequences with one query token, in place of `decodes`; None where it cannot.
        prefill_kernel: does all others, in place of `prefills`; likewise.
    """

    write_slots: torch.Tensor
    kernel: DecodeKernel | None
    prefill_kernel: PrefillKernel | None
    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_PrefillGroup, ...]


def plan_attention(
    step: StepInput, cache: PagedKvCache, shape: HeadShape, dtype: torch.dtype, window: int | None = None
) -> AttentionPlan:
    """Group the sequences of a step. `dtype` is that of scores and masks. `window`: see the module; None is all."""
    planner = _Planner(step, cache, shape, dtype, window)
    kernel, prompts = planner.decode_kernel(), planner.prefill_kernel()
    decodes = planner.decode_groups() if kernel is None else ()
    prefills = planner.prefill_groups() if prompts is None else ()
    return AttentionPlan(planner.write_slots(), kernel, prompts, decodes, prefills)


def write_kv(plan: AttentionPlan, cache: PagedKvCache, layer: int, kv: torch.Tensor) -> None:
    """Put a step's keys and values, `kv` [T, 2 * kv_heads * head_dim], into their slots."""
    rows = kv.to(cache.dtype).reshape(-1, cache.geometry.head_dim)
    cache.slots_of(layer).index_copy_(0, plan.write_slots, rows)


def attend(plan: AttentionPlan, cache: PagedKvCache, layer: int, q: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """Attention of one layer over the cache, which holds this step's tokens already.

    Args:
        q: [T, num_heads * head_dim] in the plan's dtype, rotated; may be a strided view.

    Returns:
        [T, num_heads * head_dim] in the same dtype.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    if plan.kernel is not None:
        decodes = slice(plan.kernel.num_seqs)
        plan.kernel(cache.slots_of(layer), q[decodes], out[decodes], shape.score_scale)
    if plan.prefill_kernel is not None:
        rest = slice(len(q) - plan.prefill_kernel.num_tokens, None)
        plan.prefill_kernel(cache.slots_of(layer), q[rest], out[rest], shape.score_scale)
    for group in plan.decodes:
        keys, values = _gather(group.context, cache, layer, q.dtype)
        out[group.rows] = _attend_decodes(group, q[group.rows], keys, values, shape)
    for prefill in plan.prefills:
        keys, values = _gather(prefill.context, cache, layer, q.dtype)
        for tile in prefill.tiles:
            result = _attend_tile(tile, q[tile.rows], keys, values, shape)
            if tile.keep is None:
                out[tile.rows] = result
            else:
                picked, rows = tile.keep
                out[rows] = result[picked]
    return out


def _gather(
    context: _Context, cache: PagedKvCache, layer: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a group in `dtype`: each [kv_heads * g, length, head_dim]."""
    geometry = cache.geometry
    both = cache.blocks_of(layer).index_select(0, context.blocks)
    if context.stale is not None:
        both.view(2 * geometry.num_kv_heads, -1, geometry.head_dim).index_fill_(1, context.stale, 0.0)
    both = both.to(dtype)  # nothing to do if the cache has that dtype
    both = both.view(2, geometry.num_kv_heads * context.num_seqs, context.length, geometry.head_dim)
    return both[0], both[1]


def _attend_decodes(
    group: _DecodeGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: HeadShape
) -> torch.Tensor:
    """`q` [g, num_heads * head_dim] -> the same shape."""
    seqs, kv_heads, size = group.context.num_seqs, shape.num_kv_heads, shape.head_dim
    folded = q.reshape(seqs, kv_heads, shape.group, size).transpose(0, 1).reshape(-1, shape.group, size)
    if shape.softcap is None:
        scores = torch.baddbmm(group.mask, folded, keys.transpose(1, 2), alpha=shape.score_scale)
    else:
        scores = _capped(torch.bmm(folded * shape.score_scale, keys.transpose(1, 2)), shape.softcap).add_(group.mask)
    mixed = torch.bmm(torch.softmax(scores, -1), values)
    return mixed.view(kv_heads, seqs, shape.group, size).transpose(0, 1).reshape(seqs, -1)


def _attend_tile(
    tile: _Tile, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: HeadShape
) -> torch.Tensor:
    """`q` [g * queries, num_heads * head_dim] -> the same shape."""
    kv_heads, group, size, queries = shape.num_kv_heads, shape.group, shape.head_dim, tile.queries
    seqs, seen = keys.shape[0] // kv_heads, slice(tile.first_key, tile.keys)
    folded = q.reshape(seqs, queries, kv_heads, group, size).permute(2, 0, 3, 1, 4)
    folded = folded.reshape(kv_heads * seqs, group * queries, size)
    scores = torch.bmm(folded * shape.score_scale, keys[:, seen].transpose(1, 2))
    if shape.softcap is not None:
        scores = _capped(scores, shape.softcap)
    masked = scores.view(kv_heads, seqs, group, queries, -1)[..., scores.shape[-1] - tile.mask.shape[-1] :]
    masked.add_(tile.mask)
    mixed = torch.bmm(torch.softmax(scores, -1), values[:, seen])
    mixed = mixed.view(kv_heads, seqs, group, queries, size).permute(1, 3, 0, 2, 4)
    return mixed.reshape(seqs * queries, -1)


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)


class _Planner:
    """Builds the groups of one step. Arrays are NumPy until they are final.

    With a window, the blocks before the first that any query of a sequence sees are left out, as if the sequence
    began behind them: `_lengths` and `_num_blocks` count from block `_first` of the sequence on.
    """

    def __init__(
        self, step: StepInput, cache: PagedKvCache, shape: HeadShape, dtype: torch.dtype, window: int | None
    ) -> None:
        self._step, self._cache, self._shape, self._dtype = step, cache, shape, dtype
        self._itemsize = dtype.itemsize
        self._block_size = cache.geometry.block_size
        self._planes = np.arange(2 * shape.num_kv_heads, dtype=np.int64)
        self._lengths = step.context_lens.astype(np.int64)
        self._num_blocks = -(-self._lengths // self._block_size)
        self._queries = np.diff(step.query_start).astype(np.int64)
        self._triangle: torch.Tensor | None = None
        self._window = window
        self._first: NDArray[np.int64] | None = None
        if window is not None:
            self._first = np.maximum(self._lengths - self._queries + 1 - window, 0) // self._block_size
            self._lengths -= self._first * self._block_size
            self._num_blocks -= self._first

    def write_slots(self) -> torch.Tensor:
        plane = (self._cache.geometry.num_blocks + 1) * self._block_size
        slots = self._step.slot_mapping[:, None] + self._planes[None] * plane
        return torch.from_numpy(slots.reshape(-1))

    def decode_kernel(self) -> DecodeKernel | None:
        """Sequences with one query token come first, in the order of their rows."""
        count, shape, geometry = self._step.num_decodes, self._shape, self._cache.geometry
        if self._dtype is not torch.float32 or shape.softcap is not None:
            return None
        return decode_kernel(
            self._step.block_tables[:count],
            self._step.context_lens[:count],
            kv_heads=shape.num_kv_heads,
            group=shape.group,
            head_dim=shape.head_dim,
            block_size=self._block_size,
            num_blocks=geometry.num_blocks + 1,
            window=self._window,
        )

    def prefill_kernel(self) -> PrefillKernel | None:
        """The other sequences, whose rows follow."""
        step, shape, geometry = self._step, self._shape, self._cache.geometry
        if self._dtype is not torch.float32 or shape.softcap is not None:
            return None
        rest = slice(step.num_decodes, None)
        return prefill_kernel(
            step.block_tables[rest],
            step.context_lens[rest],
            step.query_start[rest] - step.query_start[step.num_decodes],
            kv_heads=shape.num_kv_heads,
            group=shape.group,
            head_dim=shape.head_dim,
            block_size=self._block_size,
            num_blocks=geometry.num_blocks + 1,
            window=self._window,
        )

    def decode_groups(self) -> tuple[_DecodeGroup, ...]:
        count = self._step.num_decodes
        order = np.argsort(-self._num_blocks[:count], kind="stable")
        token_bytes = len(self._planes) * self._shape.head_dim * self._itemsize
        return tuple(
            self._decode_group(seqs)
            for seqs in _split(self._num_blocks[order], order, _DECODE_KV_BYTES // (token_bytes * self._block_size))
        )

    def prefill_groups(self) -> tuple[_PrefillGroup, ...]:
        pending = np.arange(self._step.num_decodes, len(self._lengths))
        order = pending[np.lexsort((-self._num_blocks[pending], -self._queries[pending]))]
        scores = self._queries * self._num_blocks * self._block_size
        limit = _SCORE_BYTES // (self._shape.num_heads * self._itemsize)
        groups = []
        for seqs in _split(scores[order], order, limit):
            # Equal score counts may still hide unlike shapes, e.g. few queries over a long context.
            padded = self._queries[seqs].max() * self._num_blocks[seqs].max() * self._block_size * len(seqs)
            if len(seqs) > 1 and padded <= min(limit, 2 * _PADDING * scores[seqs].sum()):
                groups.append(self._short_prefills(seqs))
            else:
                groups += [self._long_prefill(int(seq)) for seq in seqs]
        return tuple(groups)

    def _decode_group(self, seqs: NDArray[np.int64]) -> _DecodeGroup:
        context = self._context(seqs)
        tokens, lengths = np.arange(context.length)[None], self._lengths[seqs, None]
        visible = tokens < lengths
        if self._window is not None:
            visible &= tokens >= lengths - self._window
        mask = torch.from_numpy(np.where(visible, 0.0, -np.inf)).to(self._dtype)
        mask = mask.repeat(self._shape.num_kv_heads, 1).unsqueeze(1)
        return _DecodeGroup(context, _rows(self._step.query_start[seqs].astype(np.int64)), mask)

    def _long_prefill(self, seq: int) -> _PrefillGroup:
        """One sequence; queries in tiles, each of which reads the keys up to its last query."""
        context = self._context(np.array([seq]))
        queries, before = int(self._queries[seq]), int(self._lengths[seq] - self._queries[seq])
        first_row = int(self._step.query_start[seq])
        tiles = []
        start = 0
        while start < queries:
            first_key = self._first_key(before + start)
            row_bytes = self._shape.num_heads * self._itemsize * (before + start + _MIN_TILE - first_key)
            size = min(max(_SCORE_BYTES // row_bytes, _MIN_TILE), _MAX_TILE, queries - start)
            keys = before + start + size
            rows = slice(first_row + start, first_row + start + size)
            tiles.append(_Tile(size, rows, first_key, keys, self._causal(size, keys - first_key), None))
            start += size
        return _PrefillGroup(context, tuple(tiles))

    def _short_prefills(self, seqs: NDArray[np.int64]) -> _PrefillGroup:
        """Several sequences in one tile, padded to the longest."""
        context = self._context(seqs)
        queries = self._queries[seqs]
        longest = int(queries.max())
        offsets = np.arange(longest)[None]
        real = offsets < queries[:, None]
        rows = self._step.query_start[seqs].astype(np.int64)[:, None] + np.where(real, offsets, 0)
        # A query at position p sees keys 0..p. A padding query repeats the sequence's first one.
        positions = (self._lengths[seqs] - queries)[:, None] + np.where(real, offsets, 0)
        tokens = np.arange(context.length)[None, None]
        visible = tokens <= positions[:, :, None]
        if self._window is not None:
            visible &= tokens > positions[:, :, None] - self._window
        mask = torch.from_numpy(np.where(visible, 0.0, -np.inf)).to(self._dtype).unsqueeze(1)
        keep = None
        if not real.all():
            keep = (torch.from_numpy(np.flatnonzero(real)), torch.from_numpy(rows[real]))
        tile = _Tile(longest, torch.from_numpy(rows.reshape(-1)), 0, context.length, mask, keep)
        return _PrefillGroup(context, (tile,))

    def _context(self, seqs: NDArray[np.int64]) -> _Context:
        width = int(self._num_blocks[seqs].max())
        used = np.arange(width)[None] < self._num_blocks[seqs, None]
        if self._first is None:
            ids = self._step.block_tables[seqs, :width]
        else:
            columns = self._first[seqs, None] + np.arange(width)[None]
            ids = self._step.block_tables[seqs[:, None], np.minimum(columns, self._step.block_tables.shape[1] - 1)]
        table = np.where(used, ids, self._cache.zero_block)
        plane = self._cache.geometry.num_blocks + 1
        blocks = self._planes[:, None] * plane + table.reshape(1, -1).astype(np.int64)
        length = width * self._block_size
        tokens = np.arange(length)[None]
        ends = self._lengths[seqs, None]
        stale = np.flatnonzero((tokens >= ends) & (tokens < self._num_blocks[seqs, None] * self._block_size))
        return _Context(
            len(seqs),
            length,
            torch.from_numpy(blocks.reshape(-1)),
            torch.from_numpy(stale) if len(stale) else None,
        )

    def _first_key(self, query: int) -> int:
        """The first token that the query at token `query` sees."""
        return 0 if self._window is None else max(query + 1 - self._window, 0)

    def _causal(self, size: int, keys: int) -> torch.Tensor:
        """The mask of `size` adjacent queries, the last of which is the last of `keys` tokens.

        [size, size], -inf above the diagonal; or [size, keys] if the window hides tokens from some of them.
        """
        if self._window is not None and keys > self._window:
            queries, tokens = np.arange(keys - size, keys)[:, None], np.arange(keys)[None]
            visible = (tokens <= queries) & (tokens > queries - self._window)
            return torch.from_numpy(np.where(visible, 0.0, -np.inf)).to(self._dtype)
        if self._triangle is None or len(self._triangle) < size:
            self._triangle = torch.full((size, size), -torch.inf, dtype=self._dtype).triu(1)
        return self._triangle[:size, :size]


def _split(sizes: NDArray[np.int64], items: NDArray[np.int64], limit: int) -> list[NDArray[np.int64]]:
    """Cut `items`, whose `sizes` about fall, into runs: padded to the largest, a run's total stays within `limit`
    (unless it is a single item) and within `_PADDING` times its real total."""
    runs = []
    start = 0
    while start < len(items):
        end, real, largest = start, 0, 0
        while end < len(items):
            wider = max(largest, int(sizes[end]))
            padded = wider * (end + 1 - start)
            if end > start and (padded > limit or padded > _PADDING * (real + int(sizes[end]))):
                break
            real, largest, end = real + int(sizes[end]), wider, end + 1
        runs.append(items[start:end])
        start = end
    return runs


def _rows(rows: NDArray[np.int64]) -> slice | torch.Tensor:
    """Row numbers as a slice where they are adjacent and ascending: that needs no copy."""
    if np.all(np.diff(rows) == 1):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
