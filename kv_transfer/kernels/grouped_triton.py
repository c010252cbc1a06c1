"""`k6v4` and `k4v4` in Triton. The payload is told in `kv_transfer.codecs.grouped`, the reference in
`kv_transfer.kernels.grouped`.

The elements of a layer that are not kept are taken as a matrix, in the order that they have in the section::

    K   rows = tokens            columns = (head, dim)     a group: up to 64 rows of one column
    V   rows = (token, head)     columns = dim             a group: up to 64 columns of one row

A program has a tile of 64 by 64, so it has whole groups. Division is IEEE division and no multiplication is fused
with an addition: equal bytes need equal arithmetic.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 - Triton's compiler reads the kernels' arguments, which are flat and have no Python types

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.grouped import GROUP, GroupedLayout, grouped_layout
from kv_transfer.frames import KIND_K
from kv_transfer.kernels import grouped
from kv_transfer.kernels.backends import launching_on
from kv_transfer.kernels.floats_triton import from_float32, loadable, to_float32


class _Matrix(NamedTuple):
    """`rows` and `columns` of a layer's elements that are not kept; `kept_rows` before them are; `grid` of tiles.

    along_rows: groups lie in rows, not in columns.
    """

    rows: int
    columns: int
    kept_rows: int
    row_tiles: int
    along_rows: bool
    grid: tuple[int, int]


def encode(values: torch.Tensor, shape: SectionShape, *, key_bits: int, value_bits: int) -> torch.Tensor | None:
    """`DeviceCodec.encode`, whose arguments are checked already."""
    bits = grouped.code_bits(shape, key_bits, value_bits)
    layout = grouped_layout(shape, bits)
    if not grouped.can_encode(shape, layout):
        return None
    payload = torch.empty(layout.payload, dtype=torch.uint8, device=values.device)
    refused = torch.zeros(1, dtype=torch.int32, device=values.device)
    parts = grouped.split_payload(payload, shape, layout)
    parts.kept.copy_(grouped.by_token(values, shape)[:, : layout.kept_tokens])
    matrix = _matrix(shape, layout)
    with launching_on(values):
        _pack[matrix.grid](
            loadable(values), loadable(parts.lows), loadable(parts.highs), parts.nibbles, parts.pairs, refused,
            matrix.rows, matrix.kept_rows, matrix.row_tiles, COLUMNS=matrix.columns, BITS=bits,
            LARGEST=grouped.largest_bits(shape.dtype), ROUNDER=grouped.ROUNDER, ALONG_ROWS=matrix.along_rows,
            GROUP=GROUP, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return None if refused.item() else payload  # the one wait for the device


def decode(payload: torch.Tensor, shape: SectionShape, out: torch.Tensor, *, key_bits: int, value_bits: int) -> None:
    """`DeviceCodec.decode`, whose arguments are checked already."""
    bits = grouped.code_bits(shape, key_bits, value_bits)
    layout = grouped_layout(shape, bits)
    grouped.check_length(payload, shape, layout)
    refused = torch.zeros(1, dtype=torch.int32, device=out.device)
    parts = grouped.split_payload(payload, shape, layout)
    grouped.by_token(out, shape)[:, : layout.kept_tokens] = parts.kept
    matrix = _matrix(shape, layout)
    if matrix.rows == 0:
        return
    with launching_on(out):
        _unpack[matrix.grid](
            loadable(parts.lows), loadable(parts.highs), parts.nibbles, parts.pairs, loadable(out), refused,
            matrix.rows, matrix.kept_rows, matrix.row_tiles, COLUMNS=matrix.columns, BITS=bits,
            LARGEST=grouped.largest_bits(shape.dtype), ALONG_ROWS=matrix.along_rows, GROUP=GROUP, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    if refused.item():
        raise grouped.refuse_ranges()


def _matrix(shape: SectionShape, layout: GroupedLayout) -> _Matrix:
    along_rows = shape.kind != KIND_K
    rows_per_token = shape.head_count if along_rows else 1
    columns = shape.head_dim if along_rows else shape.head_count * shape.head_dim
    rows = (shape.token_count - layout.kept_tokens) * rows_per_token
    row_tiles = triton.cdiv(rows, GROUP)
    grid = (shape.layer_count * row_tiles, triton.cdiv(columns, GROUP))
    return _Matrix(rows, columns, layout.kept_tokens * rows_per_token, row_tiles, along_rows, grid)


@triton.jit
def _place(rows, row_tiles, COLUMNS: tl.constexpr, ALONG_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Where this program's tile lies.

    Returns:
        Its layer; its rows and columns, counted from the layer's first that is not kept, [GROUP] each; numbers of its
        groups, and which of them exist, [GROUP, 1] if they are along rows, else [1, GROUP].
    """
    layer = (tl.program_id(0) // row_tiles).to(tl.int64)
    row = tl.program_id(0) % row_tiles * GROUP + tl.arange(0, GROUP)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    if ALONG_ROWS:
        group = (layer * rows + row[:, None]) * tl.num_programs(1) + tl.program_id(1)
        exists = row[:, None] < rows
    else:
        group = tl.program_id(0).to(tl.int64) * COLUMNS + column[None, :]
        exists = column[None, :] < COLUMNS
    return layer, row, column, group, exists


@triton.jit(do_not_specialize=["rows", "kept_rows", "row_tiles"])
def _pack(
    values, lows, highs, nibbles, pairs, refused, rows, kept_rows, row_tiles, COLUMNS: tl.constexpr,
    BITS: tl.constexpr, LARGEST: tl.constexpr, ROUNDER: tl.constexpr, ALONG_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Ranges and codes of a tile.

    Args:
        values: [layers, kept_rows + rows, COLUMNS] float16, or int16 with the bits of bfloat16. lows, highs: the same
            type, one for each group, written. nibbles: uint8 [layers, rows, COLUMNS / 2], pairs: uint8 [layers, rows,
            COLUMNS / 4] (nothing if BITS is 4), written. refused: int32 [1], set to 1 if a value is not finite or
            above LARGEST (the bits of a float32); all else is then meaningless.
        rows, kept_rows, row_tiles: of a layer, see `_Matrix`. COLUMNS is a multiple of 4.
        Grid: (layers * row_tiles, ceil(COLUMNS / GROUP)).
    """
    layer, row, column, group, exists = _place(rows, row_tiles, COLUMNS, ALONG_ROWS, GROUP)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    source = (layer * (kept_rows + rows) + kept_rows + row)[:, None] * COLUMNS + column[None, :]
    value = to_float32(tl.load(values + source, mask=inside, other=0))
    # The bits of magnitudes are ordered as they are, with infinity and then NaN on top.
    largest = tl.max(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    tl.store(refused, 1, mask=largest > LARGEST)

    axis: tl.constexpr = 1 if ALONG_ROWS else 0
    low = tl.min(tl.where(inside, value, float("inf")), axis=axis, keep_dims=True)
    high = tl.max(tl.where(inside, value, float("-inf")), axis=axis, keep_dims=True)
    low = tl.where(low == 0, 0.0, low)  # one zero, not two
    high = tl.where(high == 0, 0.0, high)
    tl.store(lows + group, from_float32(low, lows.dtype.element_ty), mask=exists)
    tl.store(highs + group, from_float32(high, highs.dtype.element_ty), mask=exists)
    span = high - low
    step = tl.div_rn(tl.full(span.shape, (1 << BITS) - 1, tl.float32), span)
    step = tl.where(tl.abs(step) < float("inf"), step, 0.0)
    code = ((value - low) * step + ROUNDER).to(tl.int32, bitcast=True)

    halves = tl.reshape(code & 0xF, (GROUP, GROUP // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
    at, there = _bytes_of(layer, row, rows, COLUMNS, GROUP, 2)
    tl.store(nibbles + at, tl.sum(halves, axis=2).to(tl.uint8), mask=there)
    if BITS == 6:
        quarters = tl.reshape((code >> 4) & 3, (GROUP, GROUP // 4, 4)) << (2 * tl.arange(0, 4))[None, None, :]
        at, there = _bytes_of(layer, row, rows, COLUMNS, GROUP, 4)
        tl.store(pairs + at, tl.sum(quarters, axis=2).to(tl.uint8), mask=there)


@triton.jit
def _bytes_of(layer, row, rows, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PER_BYTE: tl.constexpr):
    """Where a tile's codes are, PER_BYTE to a byte: offsets [GROUP, GROUP / PER_BYTE], and which of them exist."""
    octet = tl.program_id(1) * (GROUP // PER_BYTE) + tl.arange(0, GROUP // PER_BYTE)
    at = (layer * rows + row)[:, None] * (COLUMNS // PER_BYTE) + octet[None, :]
    return at, (row < rows)[:, None] & (octet < COLUMNS // PER_BYTE)[None, :]


@triton.jit(do_not_specialize=["rows", "kept_rows", "row_tiles"])
def _unpack(
    lows, highs, nibbles, pairs, values, refused, rows, kept_rows, row_tiles, COLUMNS: tl.constexpr,
    BITS: tl.constexpr, LARGEST: tl.constexpr, ALONG_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Values of a tile.

    Args:
        As for `_pack`, but that `values` is written and the parts of the payload are read. refused: int32 [1], set to
            1 if a group's low and high are not finite, above LARGEST in magnitude, or not in order.
        Grid: as for `_pack`.
    """
    layer, row, column, group, exists = _place(rows, row_tiles, COLUMNS, ALONG_ROWS, GROUP)
    low = to_float32(tl.load(lows + group, mask=exists, other=0))
    high = to_float32(tl.load(highs + group, mask=exists, other=0))
    magnitude = tl.maximum(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    wrong = ((magnitude > LARGEST) | (low > high)).to(tl.int32)
    tl.store(refused, 1, mask=tl.max(tl.max(wrong, axis=1), axis=0) == 1)

    at, there = _bytes_of(layer, row, rows, COLUMNS, GROUP, 2)
    halves = tl.load(nibbles + at, mask=there, other=0).to(tl.int32)
    code = tl.reshape((halves[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 0xF, (GROUP, GROUP))
    if BITS == 6:
        at, there = _bytes_of(layer, row, rows, COLUMNS, GROUP, 4)
        quarters = tl.load(pairs + at, mask=there, other=0).to(tl.int32)
        upper = tl.reshape((quarters[:, :, None] >> (2 * tl.arange(0, 4))[None, None, :]) & 3, (GROUP, GROUP))
        code |= upper << 4
    span = high - low
    step = tl.div_rn(span, tl.full(span.shape, (1 << BITS) - 1, tl.float32))
    value = code.to(tl.float32) * step + low
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    target = (layer * (kept_rows + rows) + kept_rows + row)[:, None] * COLUMNS + column[None, :]
    tl.store(values + target, from_float32(value, values.dtype.element_ty), mask=inside)
