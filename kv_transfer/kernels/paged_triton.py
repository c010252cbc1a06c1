"""Gather and scatter of paged KV in Triton. Layouts and torch reference are in `kv_transfer.kernels.paged`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 - Triton's compiler reads the kernels' arguments, which are flat and have no Python types

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from kv_transfer.kernels.backends import launching_on
from kv_transfer.kernels.paged import PagedLayers, WireRange

_TOKENS: Final = 16
"""Tokens of one program."""


def gather(cache: PagedLayers, block_table: torch.Tensor, part: WireRange, out: torch.Tensor) -> None:
    _launch(_gather, cache, block_table, part, out)


def scatter(cache: PagedLayers, block_table: torch.Tensor, part: WireRange, wire: torch.Tensor) -> None:
    _launch(_scatter, cache, block_table, part, wire)


def _launch(kernel: Any, cache: PagedLayers, block_table: torch.Tensor, part: WireRange, wire: torch.Tensor) -> None:
    words = wire.view(torch.int16 if wire.element_size() == 2 else torch.int32)  # copied as they are
    grid = (triton.cdiv(part.token_count, _TOKENS), part.head_count, 2 * part.layer_count)
    with launching_on(wire):
        kernel[grid](
            cache.pointers, block_table, words, part.layer_start, part.token_start, part.token_count,
            part.head_start, part.head_count, wire.stride(0), wire.stride(1), cache.num_blocks,
            HEADS=cache.num_kv_heads, BLOCK_SIZE=cache.block_size, DIM=cache.head_dim,
            TOKENS=_TOKENS, DIM_BLOCK=triton.next_power_of_2(cache.head_dim), num_warps=4,
        )  # fmt: skip


@triton.jit
def _locate(
    layers, table, words, layer_start, token_start, token_count, head_start, layer_stride, kind_stride, head_count,
    num_blocks, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """The elements of one program, [TOKENS, DIM_BLOCK]: where in the cache, where in the wire tensor, which exist.

    A block id outside the cache is never followed: its tokens do not exist.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    layer = tl.program_id(2) // 2
    kind = tl.program_id(2) % 2
    dim = tl.arange(0, DIM_BLOCK)
    position = token_start + token
    block = tl.load(table + position // BLOCK_SIZE, mask=token < token_count, other=-1).to(tl.int64)
    inside = ((block >= 0) & (block < num_blocks))[:, None] & (dim < DIM)[None, :]
    plane = (kind * num_blocks + block) * HEADS + head_start + head
    row = plane * BLOCK_SIZE + position % BLOCK_SIZE
    base = tl.multiple_of(tl.load(layers + layer_start + layer).to(words.dtype), 16)
    target = (
        layer.to(tl.int64) * layer_stride
        + kind.to(tl.int64) * kind_stride
        + (token[:, None].to(tl.int64) * head_count + head) * DIM
        + dim[None, :]
    )
    return base + row[:, None] * DIM + dim[None, :], words + target, inside


@triton.jit(do_not_specialize=["layer_start", "token_start", "token_count", "head_start", "head_count", "num_blocks"])
def _gather(
    layers, table, words, layer_start, token_start, token_count, head_start, head_count, layer_stride, kind_stride,
    num_blocks, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy TOKENS tokens of one head of K or V of one layer out of the cache.

    Args:
        layers: int64 [all layers], addresses of int16 or int32 [2, num_blocks, HEADS, BLOCK_SIZE, DIM], 16-byte
            aligned. table: int32 [blocks]. words: the cache's integer type, written, [layers, 2, tokens, head_count,
            DIM] with strides layer_stride and kind_stride, the rest contiguous.
        *_start, *_count: the range, see `WireRange`.
        Grid: (ceil(token_count / TOKENS), head_count, 2 * layers); the third: K and V of a layer, then of the next.
    """
    source, target, inside = _locate(
        layers, table, words, layer_start, token_start, token_count, head_start, layer_stride, kind_stride,
        head_count, num_blocks, HEADS, BLOCK_SIZE, DIM, TOKENS, DIM_BLOCK,
    )  # fmt: skip
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["layer_start", "token_start", "token_count", "head_start", "head_count", "num_blocks"])
def _scatter(
    layers, table, words, layer_start, token_start, token_count, head_start, head_count, layer_stride, kind_stride,
    num_blocks, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy TOKENS tokens of one head of K or V of one layer into the cache: arguments and grid as for `_gather`."""
    target, source, inside = _locate(
        layers, table, words, layer_start, token_start, token_count, head_start, layer_stride, kind_stride,
        head_count, num_blocks, HEADS, BLOCK_SIZE, DIM, TOKENS, DIM_BLOCK,
    )  # fmt: skip
    tl.store(target, tl.load(source, mask=inside), mask=inside)
