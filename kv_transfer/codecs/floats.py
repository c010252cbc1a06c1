"""Elements of a cache as float32 and back, for codecs that calculate with them.

numpy knows no bfloat16, so it is handled as its bits: the upper half of a float32. Every conversion back rounds to
nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

FLOAT_DTYPES: Final = ("bfloat16", "float16", "float32")

LARGEST: Final[Mapping[str, float]] = MappingProxyType({"bfloat16": 3.3e38, "float16": 6.5e4, "float32": 3.3e38})
"""Magnitudes up to this are encoded; what rounding adds to them still fits the dtype. More is sent raw."""

_UNSIGNED: Final = MappingProxyType({"bfloat16": "<u2", "float16": "<u2", "float32": "<u4"})


def bits(values: NDArray[np.uint8], dtype: str) -> NDArray[np.unsignedinteger]:
    """A section's bytes as unsigned integers, one per element; a view."""
    return values.view(_UNSIGNED[dtype])


def to_float32(elements: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.float32]:
    """`elements`, as `bits` gives them, of any shape and contiguous; exact. Not to be written to: may be a view."""
    if dtype == "float32":
        return elements.view("<f4")
    if dtype == "float16":
        return elements.view("<f2").astype(np.float32)
    wide = elements.astype(np.uint32)
    return np.left_shift(wide, 16, out=wide).view(np.float32)


def round_into(numbers: NDArray[np.float32], dtype: str, out: NDArray[np.unsignedinteger]) -> None:
    """Round `numbers`, contiguous, to `dtype` and put the bits into `out` of the same shape. Uses `numbers` up."""
    if dtype == "float32":
        out[...] = numbers.view(np.uint32)
    elif dtype == "float16":
        with np.errstate(over="ignore"):  # a hostile payload decodes to infinity, not to a warning
            out[...] = numbers.astype("<f2").view("<u2")
    else:
        wide = numbers.view(np.uint32)
        odd = np.right_shift(wide, 16)
        odd &= np.uint32(1)
        wide += np.uint32(0x7FFF)
        wide += odd
        wide >>= np.uint32(16)
        np.copyto(out, wide, casting="unsafe")


def round_up_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the smallest bfloat16 that is at least as large, for finite numbers >= 0."""
    wide = numbers.view(np.uint32) + np.uint32(0xFFFF)
    return (wide >> np.uint32(16)).astype("<u2")


def read_scales(raw: memoryview, largest_code: int, dtype: str) -> NDArray[np.float32] | None:
    """Scales, as bfloat16 bits, that make codes up to `largest_code` numbers of `dtype`; None if one does not."""
    scales = to_float32(np.frombuffer(raw, "<u2"), "bfloat16")
    most = to_float32(round_up_bfloat16(np.array([LARGEST[dtype] / largest_code], np.float32)), "bfloat16")[0]
    return scales if np.all((scales >= 0) & (scales <= most)) else None


def largest_magnitude(elements: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.float32]:
    """max|x| over the last axis, exactly; NaN or infinity where an element is not finite."""
    # Without the sign the bits of floats are ordered as their magnitudes are.
    magnitude = np.bitwise_and(elements, 0x7FFFFFFF if dtype == "float32" else 0x7FFF)
    return to_float32(np.ascontiguousarray(magnitude.max(axis=-1)), dtype)
