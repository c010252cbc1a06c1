"""`q8` in Triton. The payload and its torch reference are in `kv_transfer.kernels.q8`.

Equal bytes need equal arithmetic, so divisions are IEEE divisions, not Triton's faster ones, and rounding is done by
adding and subtracting 1.5 * 2**23, which leaves a float32 of small magnitude no bits behind the point: half to even,
as the addition rounds. No multiplication may be fused with an addition.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 - Triton's compiler reads the kernels' arguments, which are flat and have no Python types

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kv_transfer.codecs.base import SectionShape
from kv_transfer.kernels import q8
from kv_transfer.kernels.backends import launching_on
from kv_transfer.kernels.floats_triton import from_float32, loadable, to_float32

_ELEMENTS: Final = 4096
"""Elements of one program: as many rows as fit."""


def encode(values: torch.Tensor, shape: SectionShape) -> torch.Tensor | None:
    """`DeviceCodec.encode`, whose arguments are checked already."""
    if q8.payload_bytes(shape) >= shape.raw_bytes:
        return None
    payload = torch.empty(q8.payload_bytes(shape), dtype=torch.uint8, device=values.device)
    refused = torch.zeros(1, dtype=torch.int32, device=values.device)
    rows, dim_block, block_rows = _blocks(shape)
    with launching_on(values):
        _quantise[(triton.cdiv(rows, block_rows),)](
            loadable(values), payload[: 2 * rows].view(torch.int16), payload[2 * rows :].view(torch.int8), refused,
            rows, DIM=shape.head_dim, LEVELS=q8.LEVELS, LARGEST=q8.largest_bits(shape.dtype), ROWS=block_rows,
            DIM_BLOCK=dim_block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return None if refused.item() else payload  # the one wait for the device


def decode(payload: torch.Tensor, shape: SectionShape, out: torch.Tensor) -> None:
    """`DeviceCodec.decode`, whose arguments are checked already."""
    q8.check_length(payload, shape)
    refused = torch.zeros(1, dtype=torch.int32, device=out.device)
    rows, dim_block, block_rows = _blocks(shape)
    with launching_on(out):
        _dequantise[(triton.cdiv(rows, block_rows),)](
            payload[: 2 * rows].view(torch.int16), payload[2 * rows :].view(torch.int8), loadable(out), refused,
            rows, DIM=shape.head_dim, EXPONENT=q8.EXPONENT, ROWS=block_rows, DIM_BLOCK=dim_block, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    if refused.item():
        raise q8.refuse_scales()


def _blocks(shape: SectionShape) -> tuple[int, int, int]:
    """Rows of the section, elements of a row with padding, rows of a program."""
    dim_block = triton.next_power_of_2(shape.head_dim)
    return q8.rows_of(shape), dim_block, max(1, _ELEMENTS // dim_block)


@triton.jit(do_not_specialize=["rows"])
def _quantise(
    values, scales, codes, refused, rows, DIM: tl.constexpr, LEVELS: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales and codes of ROWS rows.

    Args:
        values: [rows, DIM] float32, float16, or int16 with the bits of bfloat16. scales: int16 [rows] for the bits of
            bfloat16, written. codes: int8 [rows, DIM], written. refused: int32 [1], set to 1 if a value is not finite
            or above LARGEST (the bits of a float32); scales and codes are then meaningless.
        Grid: (ceil(rows / ROWS),).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (row < rows)[:, None] & (dim < DIM)[None, :]
    element = row[:, None] * DIM + dim[None, :]
    value = to_float32(tl.load(values + element, mask=inside, other=0))
    # The bits of magnitudes are ordered as they are, with infinity and then NaN on top.
    peak_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(refused, 1, mask=tl.max(peak_bits, axis=0) > LARGEST)
    levels = tl.full((ROWS,), LEVELS, tl.float32)
    step = tl.div_rn(peak_bits.to(tl.float32, bitcast=True), levels)
    scale_bits = (step.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    # A row with scale 0 may hold values that are too small for one.
    empty = scale_bits == 0
    divisor = tl.where(empty, 1.0, scale)
    code = tl.div_rn(value, tl.broadcast_to(divisor[:, None], (ROWS, DIM_BLOCK)))
    code = (code + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -LEVELS), LEVELS)
    code = tl.where(empty[:, None], 0.0, code)
    tl.store(scales + row, scale_bits.to(tl.int16), mask=row < rows)
    tl.store(codes + element, code.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _dequantise(
    scales, codes, out, refused, rows, DIM: tl.constexpr, EXPONENT: tl.constexpr, ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of ROWS rows.

    Args:
        scales: int16 [rows] with the bits of bfloat16. codes: int8 [rows, DIM]. out: [rows, DIM] float32, float16, or
            int16 for the bits of bfloat16, written. refused: int32 [1], set to 1 if a scale is not finite.
        Grid: (ceil(rows / ROWS),).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (row < rows)[:, None] & (dim < DIM)[None, :]
    element = row[:, None] * DIM + dim[None, :]
    scale_bits = tl.load(scales + row, mask=row < rows, other=0).to(tl.int32)
    tl.store(refused, 1, mask=tl.max(((scale_bits & EXPONENT) == EXPONENT).to(tl.int32), axis=0) == 1)
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    code = tl.load(codes + element, mask=inside, other=0)
    value = code.to(tl.float32) * scale[:, None]
    tl.store(out + element, from_float32(value, out.dtype.element_ty), mask=inside)
