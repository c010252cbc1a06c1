"""`q8` on a device: the layout of its payload, and the torch reference of its kernels.

Lossy: int8 with a scale for each token and head. `kv_transfer.codecs.q8` is the same codec for host memory; all give
identical bytes. A *row* is the head_dim elements of a (layer, token, head)::

    u16 [rows]        scale: max |x| / 127, rounded up to a bfloat16; 0 for a row of zeros
    i8  [rows, dim]   x / scale, rounded half to even, at most 127 in magnitude; 0 where the scale is 0
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.floats import LARGEST
from pdcore.errors import FrameError

LEVELS: Final = 127.0
EXPONENT: Final = 0x7F80
"""The exponent of a bfloat16: all ones in infinities and NaNs."""


def rows_of(shape: SectionShape) -> int:
    return shape.elements // shape.head_dim


def payload_bytes(shape: SectionShape) -> int:
    return 2 * rows_of(shape) + shape.elements


def check_length(payload: torch.Tensor, shape: SectionShape) -> None:
    if payload.numel() != payload_bytes(shape):
        raise FrameError(
            f"a q8 payload of {payload.numel()} bytes for {rows_of(shape)} rows of {shape.head_dim}, "
            f"which have {payload_bytes(shape)}"
        )


def largest_bits(dtype: str) -> int:
    """The largest magnitude that is encoded, as the bits of a float32. Those bits are ordered as magnitudes are."""
    return int(np.float32(LARGEST[dtype]).view(np.int32))


def refuse_scales() -> FrameError:
    return FrameError("a q8 payload has a scale that is not finite")


def encode(values: torch.Tensor, shape: SectionShape) -> torch.Tensor | None:
    """`DeviceCodec.encode`, whose arguments are checked already."""
    if payload_bytes(shape) >= shape.raw_bytes:
        return None
    rows = values.view(-1, shape.head_dim).float()
    peak = rows.abs().amax(1)
    if not (peak <= LARGEST[shape.dtype]).all():  # amax hands NaN on, and no comparison with it is true
        return None
    # A tensor: torch multiplies by the reciprocal of a number.
    scale_bits = ((peak / torch.full_like(peak, LEVELS)).view(torch.int32) + 0xFFFF) >> 16
    scale = (scale_bits << 16).view(torch.float32)
    divisor = torch.where(scale == 0, 1.0, scale)  # a row with scale 0 may hold what is too small for one
    codes = (rows / divisor.unsqueeze(1)).round().clamp(-LEVELS, LEVELS)
    codes = torch.where(scale.unsqueeze(1) == 0, 0.0, codes)
    return torch.cat([scale_bits.to(torch.int16).view(torch.uint8), codes.to(torch.int8).view(torch.uint8).view(-1)])


def decode(payload: torch.Tensor, shape: SectionShape, out: torch.Tensor) -> None:
    """`DeviceCodec.decode`, whose arguments are checked already."""
    check_length(payload, shape)
    rows = rows_of(shape)
    scale_bits = payload[: 2 * rows].view(torch.int16).to(torch.int32)
    if (scale_bits & EXPONENT == EXPONENT).any():
        raise refuse_scales()
    scale = (scale_bits << 16).view(torch.float32)
    codes = payload[2 * rows :].view(torch.int8).view(rows, -1)
    out.view(rows, -1).copy_(codes.float() * scale.unsqueeze(1))
