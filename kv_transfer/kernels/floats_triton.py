"""Elements as float32 and back, for kernels that calculate with them.

bfloat16 comes and goes as int16 with its bits, converted by shifting: on a GPU and in Triton's interpreter alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


def loadable(values: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that the functions below take."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


@triton.jit
def to_float32(value):
    """From float32, float16, or int16 with the bits of a bfloat16; exact."""
    if value.dtype == tl.int16:
        number = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        number = value.to(tl.float32)
    return number


@triton.jit
def from_float32(number, dtype: tl.constexpr):
    """To float32, float16, or int16 with the bits of a bfloat16; rounded to nearest, ties to even. Not for NaN."""
    if dtype == tl.int16:
        # What is added carries into the upper half if the lower half is above its middle, or there and the upper odd.
        bits = number.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        value = number.to(dtype)
    return value
