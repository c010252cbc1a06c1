"""The paged KV cache of the CPU backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pdcore.types import DTYPE_BYTES, KvGeometry

_ALIGNMENT = 64


class PagedKvCache:
    """K and V of all layers in blocks, laid out so that a head's keys in a block are one contiguous piece.

    ::

        layer l:  [K head 0 | K head 1 | ... | V head 0 | V head 1 | ...]       2 * num_kv_heads planes
        plane:    [block 0 | block 1 | ... | block num_blocks - 1 | zero block]  block_size * head_dim each

    The zero block is never written. Attention reads it where a batch must be padded, so that padding is finite
    whatever the blocks of others hold. Memory is zero at first and taken from the system as blocks are first used.

    `gather` and `scatter` copy single-threaded and without the GIL, for they run beside the engine's own threads.
    They may be called from several threads at once: gathers on any blocks, a scatter on blocks nobody else touches.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        planes, blocks = 2 * geometry.num_kv_heads, geometry.num_blocks + 1
        shape = (geometry.num_layers, planes, blocks * geometry.block_size, geometry.head_dim)
        num_bytes = int(np.prod(shape)) * DTYPE_BYTES[geometry.dtype]
        memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)  # untouched pages cost nothing, unlike torch.zeros
        start = -memory.ctypes.data % _ALIGNMENT
        raw = memory[start : start + num_bytes]
        self._data = torch.from_numpy(raw).view(self.dtype).view(shape)
        # The same memory as integers, for NumPy knows no bfloat16: [layers, 2, heads, slots, head_dim].
        integer = np.uint32 if DTYPE_BYTES[geometry.dtype] == 4 else np.uint16
        self._canonical = raw.view(integer).reshape(shape[0], 2, geometry.num_kv_heads, *shape[2:])

    @property
    def zero_block(self) -> int:
        """Id of the block that is always zero."""
        return self.geometry.num_blocks

    def slots_of(self, layer: int) -> torch.Tensor:
        """One layer by slots: a view [2 * num_kv_heads * slots_per_plane, head_dim]."""
        return self._data[layer].view(-1, self.geometry.head_dim)

    def blocks_of(self, layer: int) -> torch.Tensor:
        """One layer by blocks: a view [2 * num_kv_heads * blocks_per_plane, block_size * head_dim]."""
        return self._data[layer].view(-1, self.geometry.block_size * self.geometry.head_dim)

    def gather(
        self, layer_start: int, layer_count: int, block_ids: Sequence[int], token_start: int, token_count: int
    ) -> torch.Tensor:
        """Copy K and V out of the cache.

        Args:
            block_ids: the sequence's whole block table; token t is in ``block_ids[t // block_size]``.
            token_start, token_count: range of tokens, counted from the start of the sequence.

        Returns:
            Contiguous CPU tensor [layer_count, 2, token_count, num_kv_heads, head_dim] in the cache's dtype.

        Raises:
            ValueError: a layer, token or block is out of range.
        """
        self._check_layers(layer_start, layer_count)
        geometry = self.geometry
        shape = (layer_count, 2, token_count, geometry.num_kv_heads, geometry.head_dim)
        out = np.empty(shape, self._canonical.dtype)
        layers = self._canonical[layer_start : layer_start + layer_count]
        for token, slot, count in self._runs(block_ids, token_start, token_count):
            np.copyto(out[:, :, token : token + count], layers[:, :, :, slot : slot + count].swapaxes(2, 3))
        return torch.from_numpy(out).view(self.dtype)

    def scatter(
        self, layer_start: int, block_ids: Sequence[int], token_start: int, values: torch.Tensor, head_start: int = 0
    ) -> None:
        """Copy K and V into the cache; the inverse of `gather`, `values` as it returns them, or fewer heads of it.

        Args:
            head_start: where the heads of `values` begin, counted from this cache's first.

        Raises:
            ValueError: a layer, token, head or block is out of range, or `values` has another shape or dtype.
        """
        geometry = self.geometry
        shaped = values.dim() == 5 and (values.shape[1], values.shape[4]) == (2, geometry.head_dim)
        if not shaped or values.dtype != self.dtype:
            raise ValueError(
                f"values must be {self.dtype} [layers, 2, tokens, heads, {geometry.head_dim}], "
                f"got {values.dtype} {list(values.shape)}"
            )
        head_stop = head_start + values.shape[3]
        if not 0 <= head_start < head_stop <= geometry.num_kv_heads:
            raise ValueError(f"heads {head_start}..{head_stop} are not within 0..{geometry.num_kv_heads}")
        self._check_layers(layer_start, values.shape[0])
        source = values.contiguous().view(torch.uint8).numpy().view(self._canonical.dtype)
        layers = self._canonical[layer_start : layer_start + values.shape[0], :, head_start:head_stop]
        for token, slot, count in self._runs(block_ids, token_start, values.shape[2]):
            np.copyto(layers[:, :, :, slot : slot + count].swapaxes(2, 3), source[:, :, token : token + count])

    def _check_layers(self, start: int, count: int) -> None:
        if not (start >= 0 and count >= 1 and start + count <= self.geometry.num_layers):
            raise ValueError(f"layers {start}..{start + count} are not within 0..{self.geometry.num_layers}")

    def _runs(self, block_ids: Sequence[int], token_start: int, token_count: int) -> Iterator[tuple[int, int, int]]:
        """Split a token range into runs of adjacent slots: (offset into the range, first slot, tokens)."""
        size = self.geometry.block_size
        end = token_start + token_count
        if token_start < 0 or token_count < 1 or end > len(block_ids) * size:
            raise ValueError(f"tokens {token_start}..{end} are not within {len(block_ids)} blocks of {size}")
        used = block_ids[token_start // size : -(-end // size)]
        if not all(0 <= block < self.geometry.num_blocks for block in used):
            raise ValueError(f"block ids must be within 0..{self.geometry.num_blocks - 1}, got {list(used)}")
        token = token_start
        while token < end:
            index = token // size
            last = index
            while (last + 1) * size < end and block_ids[last + 1] == block_ids[last] + 1:
                last += 1
            stop = min((last + 1) * size, end)
            yield token - token_start, block_ids[index] * size + token % size, stop - token
            token = stop
