"""Between the GPU backend's paged KV cache and the wire layout: gather and scatter, and their torch reference.

::

    cache   one tensor a layer   [2 (K, V), num_blocks, num_kv_heads, block_size, head_dim]
    wire                         [layers, 2 (K, V), tokens, heads, head_dim]

Token t of a sequence is in row ``t % block_size`` of block ``block_table[t // block_size]``. Ranges of tokens may
start and end within a block; ranges of heads are for peers of other tensor-parallel degrees. Elements are copied bit
by bit.

A wire tensor's tokens, heads and dims are contiguous. Its layers and kinds may lie anywhere: `empty_wire` puts all K
before all V, so that ``wire[:, 0]`` and ``wire[:, 1]`` are contiguous sections as a frame and its codecs want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kv_transfer.kernels.backends import Backend, backend_for


class WireRange(NamedTuple):
    """A part of a sequence's KV: tokens counted from the sequence's start, heads and layers from the cache's."""

    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    head_start: int
    head_count: int


class PagedLayers:
    """The layers of a paged cache, as `gather` and `scatter` take them. Refers to the tensors, does not copy them.

    Args:
        layers: tensors [2, num_blocks, num_kv_heads, block_size, head_dim], contiguous and 16-byte aligned, alike in
            all but content.

    Raises:
        ValueError: they are not alike or not such tensors.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        first = layers[0]
        for layer in layers:
            alike = (layer.shape, layer.dtype, layer.device) == (first.shape, first.dtype, first.device)
            placed = layer.is_contiguous() and layer.data_ptr() % 16 == 0
            if not alike or layer.dim() != 5 or layer.shape[0] != 2 or not placed:
                raise ValueError(
                    "a layer must be a tensor [2, num_blocks, num_kv_heads, block_size, head_dim], contiguous, "
                    f"16-byte aligned, alike in each layer, got "
                    f"{layer.dtype} {list(layer.shape)} on {layer.device} at {layer.data_ptr():#x}"
                )
        self.layers = tuple(layers)
        _, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim = first.shape
        self.dtype, self.device = first.dtype, first.device
        self.pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=first.device)
        """int64 [layers], on the device: where each layer starts."""

    def block_table(self, block_ids: Sequence[int]) -> torch.Tensor:
        """A sequence's blocks, int32 [blocks] on the cache's device. ValueError: an id is not the cache's."""
        if not all(0 <= block < self.num_blocks for block in block_ids):
            raise ValueError(f"block ids must be within 0..{self.num_blocks - 1}, got {list(block_ids)}")
        return torch.tensor(block_ids, dtype=torch.int32).to(self.device, non_blocking=True)

    def empty_wire(self, part: WireRange) -> torch.Tensor:
        """Uninitialised [layers, 2, tokens, heads, head_dim] on the cache's device, in memory all K before all V."""
        shape = (2, part.layer_count, part.token_count, part.head_count, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device).transpose(0, 1)


def gather(
    cache: PagedLayers,
    block_table: torch.Tensor,
    part: WireRange,
    out: torch.Tensor,
    backend: Backend | None = None,
) -> None:
    """Copy `part` of a sequence out of the cache. Queued on the device's current stream; does not wait.

    Args:
        block_table: int32 [blocks] on the cache's device, from `PagedLayers.block_table`.
        out: [layers, 2, tokens, heads, head_dim] as the module says, in the cache's dtype and on its device.
        backend: None: Triton where there is a GPU, torch elsewhere.

    Raises:
        ValueError: a range is not within the cache or the table, or `out` is not of its shape.
    """
    _check(cache, block_table, part, out)
    if (backend or backend_for(cache.device)) == "triton":
        from kv_transfer.kernels import paged_triton

        paged_triton.gather(cache, block_table, part, out)
        return
    for index, layer in enumerate(_layers(cache, part)):
        blocks, rows = _slots(cache, block_table, part)
        out[index].copy_(layer[:, blocks, :, rows].transpose(0, 1)[:, :, _heads(part)])


def scatter(
    cache: PagedLayers,
    block_table: torch.Tensor,
    part: WireRange,
    wire: torch.Tensor,
    backend: Backend | None = None,
) -> None:
    """Copy `wire` into the cache: the inverse of `gather`, with the same arguments and errors.

    No block may be twice in the part of the table that is used.
    """
    _check(cache, block_table, part, wire)
    if (backend or backend_for(cache.device)) == "triton":
        from kv_transfer.kernels import paged_triton

        paged_triton.scatter(cache, block_table, part, wire)
        return
    for index, layer in enumerate(_layers(cache, part)):
        blocks, rows = _slots(cache, block_table, part)
        layer[:, :, _heads(part)][:, blocks, :, rows] = wire[index].transpose(0, 1)


def _layers(cache: PagedLayers, part: WireRange) -> tuple[torch.Tensor, ...]:
    return cache.layers[part.layer_start : part.layer_start + part.layer_count]


def _heads(part: WireRange) -> slice:
    return slice(part.head_start, part.head_start + part.head_count)


def _slots(cache: PagedLayers, block_table: torch.Tensor, part: WireRange) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and row of each token, int64 [tokens]. Indexing with both puts the tokens first, the kinds second."""
    tokens = torch.arange(part.token_start, part.token_start + part.token_count, device=cache.device)
    return block_table.long()[tokens // cache.block_size], tokens % cache.block_size


def _check(cache: PagedLayers, block_table: torch.Tensor, part: WireRange, wire: torch.Tensor) -> None:
    for what, start, count, limit in (
        ("layers", part.layer_start, part.layer_count, len(cache.layers)),
        ("tokens", part.token_start, part.token_count, block_table.numel() * cache.block_size),
        ("heads", part.head_start, part.head_count, cache.num_kv_heads),
    ):
        if start < 0 or count < 1 or start + count > limit:
            raise ValueError(f"{what} {start}..{start + count} are not within 0..{limit}")
    if block_table.dtype != torch.int32 or block_table.dim() != 1 or block_table.device != cache.device:
        raise ValueError(
            f"a block table must be int32 [blocks] on {cache.device}, got {block_table.dtype} "
            f"{list(block_table.shape)} on {block_table.device}"
        )
    shape = (part.layer_count, 2, part.token_count, part.head_count, cache.head_dim)
    if wire.shape != shape or wire.dtype != cache.dtype or wire.device != cache.device:
        raise ValueError(
            f"the wire tensor must be {cache.dtype} {list(shape)} on {cache.device}, got {wire.dtype} "
            f"{list(wire.shape)} on {wire.device}"
        )
    if not wire[0, 0].is_contiguous():
        raise ValueError(
            f"tokens, heads and dims of the wire tensor must be contiguous; its strides are {wire.stride()}"
        )
