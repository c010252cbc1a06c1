"""A `KvStore` in memory, small and obviously right: the fake that transfer tests fill, send from and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kv_transfer.conversion import TORCH_DTYPES
from pdcore.types import KvGeometry


def small_geometry(
    *,
    dtype: str = "bfloat16",
    block_size: int = 16,
    num_blocks: int = 64,
    layers: int = 3,
    digest: str = "abc123",
    heads: tuple[int, int] = (0, 2),
) -> KvGeometry:
    """A geometry of heads (first, count) of eight dimensions."""
    head_start, head_count = heads
    return KvGeometry(digest, layers, head_count, 8, dtype, block_size, num_blocks, head_start)


class MemoryKvStore:
    """A paged cache as one tensor [layer, 2, block, offset, head, dim], zero at first.

    `on_gather` and `on_scatter`, if set, are called on every call before it touches the cache: tests block or fail
    there.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry
        self.cache = torch.zeros(
            geometry.num_layers,
            2,
            geometry.num_blocks,
            geometry.block_size,
            geometry.num_kv_heads,
            geometry.head_dim,
            dtype=TORCH_DTYPES[geometry.dtype],
        )
        self.on_gather: Callable[[int, int], None] | None = None
        self.on_scatter: Callable[[int, int], None] | None = None

    def gather(
        self, layer_start: int, layer_count: int, block_ids: Sequence[int], token_start: int, token_count: int
    ) -> torch.Tensor:
        if self.on_gather is not None:
            self.on_gather(layer_start, token_start)
        blocks, offsets = self._slots(block_ids, token_start, token_count)
        return self.cache[layer_start : layer_start + layer_count, :, blocks, offsets].contiguous()

    def scatter(
        self, layer_start: int, block_ids: Sequence[int], token_start: int, values: torch.Tensor, head_start: int = 0
    ) -> None:
        if self.on_scatter is not None:
            self.on_scatter(layer_start, token_start)
        assert values.is_contiguous()
        assert values.dtype == self.cache.dtype
        blocks, offsets = self._slots(block_ids, token_start, values.shape[2])
        heads = slice(head_start, head_start + values.shape[3])
        self.cache[layer_start : layer_start + values.shape[0], :, blocks, offsets, heads] = values

    def fill(self, block_ids: Sequence[int], num_tokens: int, seed: int) -> torch.Tensor:
        """Write KV drawn from `seed` for tokens ``[0, num_tokens)``; returns it as `gather` would."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.geometry.num_layers, 2, num_tokens, self.geometry.num_kv_heads, self.geometry.head_dim)
        values = torch.randn(shape, generator=generator).to(self.cache.dtype)
        blocks, offsets = self._slots(block_ids, 0, num_tokens)
        self.cache[:, :, blocks, offsets] = values
        return values

    def read(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """KV of tokens ``[0, num_tokens)``, as `gather` returns it, past `on_gather`."""
        blocks, offsets = self._slots(block_ids, 0, num_tokens)
        return self.cache[:, :, blocks, offsets].contiguous()

    def _slots(self, block_ids: Sequence[int], start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(start, start + count)
        table = torch.tensor(block_ids)
        return table[tokens // self.geometry.block_size], tokens % self.geometry.block_size
