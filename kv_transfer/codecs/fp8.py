"""`fp8`: eight-bit floats (e4m3), one scale for each layer, token and head. For comparison with `q8`.

Laid out as `q8`, with e4m3 codes (sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity; 0x7f and 0xff are
not numbers and are not used) in place of int8, and ``max|x| / 448`` in place of ``max|x| / 127``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape
from kv_transfer.codecs.floats import (
    FLOAT_DTYPES,
    LARGEST,
    bits,
    largest_magnitude,
    read_scales,
    round_into,
    round_up_bfloat16,
    to_float32,
)
from kv_transfer.frames import NO_TAG
from pdcore.errors import FrameError

_LARGEST_CODE: Final = 448
_NO_NUMBER: Final = 0x7F
_SMALLEST_NORMAL: Final = np.float32(2.0**-6)
_SUBNORMAL_ROUNDER: Final = np.float32(2.0**14)  # its last bit is worth 2**-9, as that of a subnormal e4m3
_BIAS: Final = (127 - 7) << 3


def _table() -> NDArray[np.float32]:
    """Value of each code; of no use for the two that have none."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.concatenate((values, -values)).astype(np.float32)


_VALUES: Final = _table()


class Fp8Codec:
    """e4m3 per token and head."""

    name = "fp8"
    version = 1
    lossless = False
    calibration = NO_TAG
    parameters = NO_TAG
    dtypes: tuple[str, ...] = FLOAT_DTYPES

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        elements = bits(values, shape.dtype).reshape(-1, shape.head_dim)
        largest = largest_magnitude(elements, shape.dtype)
        if not np.all(largest <= LARGEST[shape.dtype]):  # false for NaN
            return None
        scales = round_up_bfloat16(largest / np.float32(_LARGEST_CODE))
        divisors = to_float32(scales, "bfloat16")
        divisors[divisors == 0] = 1  # those rows are zero, or so small that they become zero
        codes = _to_e4m3(to_float32(elements, shape.dtype) / divisors[:, None])
        size = scales.nbytes + codes.nbytes
        return (scales.view(np.uint8).data, codes.reshape(-1).data) if size < values.size else None

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        rows = shape.elements // shape.head_dim
        start = 2 * rows
        if len(payload) != start + shape.elements:
            raise FrameError(f"an fp8 payload of {len(payload)} bytes for {rows} rows of {shape.head_dim}")
        scales = read_scales(payload[:start], _LARGEST_CODE, shape.dtype)
        codes = np.frombuffer(payload[start:], np.uint8).reshape(rows, shape.head_dim)
        if scales is None or np.any((codes & np.uint8(0x7F)) == _NO_NUMBER):
            raise FrameError("an fp8 payload has a code that is not a number, or a scale that cannot be one")
        numbers = _VALUES[codes]
        numbers *= scales[:, None]
        round_into(numbers, shape.dtype, bits(out, shape.dtype).reshape(rows, shape.head_dim))


def _to_e4m3(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of numbers within +-448, rounded to nearest, ties to even."""
    raw = numbers.view(np.uint32)
    sign = (raw >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    magnitude = raw & np.uint32(0x7FFFFFFF)
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    small = np.abs(numbers) + _SUBNORMAL_ROUNDER
    subnormal = small.view(np.uint32) - _SUBNORMAL_ROUNDER.view(np.uint32)
    is_small = np.abs(numbers) < _SMALLEST_NORMAL
    return np.where(is_small, subnormal, rounded - np.uint32(_BIAS)).astype(np.uint8) | sign
