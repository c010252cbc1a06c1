"""`q8` and `q8-zstd`: eight bits per element, one scale for each layer, token and head.

::

    row     = the head_dim elements of one (layer, token, head); rows in that order
    scale   = max|x| / 127 in float32, rounded up to a bfloat16; 0 for a row of zeros
    q       = x / scale, rounded to nearest, ties to even; 0 where the scale is 0
    payload = | rows x bfloat16 scale | n bytes q as int8 |                  q8       (n elements)
              | rows x bfloat16 scale | one zstd frame of the n bytes |      q8-zstd
    x'      = q * scale in float32, rounded to the dtype

A section with an element that is not finite is sent raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape
from kv_transfer.codecs.bounded_zstd import FrameCompressor, decompress
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

_SCALE_BYTES: Final = 2
_LARGEST_CODE: Final = 127
# Adding it leaves a float32 whose last bits are the number rounded to nearest, ties to even, in two's complement.
_ROUNDER: Final = np.float32(3 << 22)
# What pays is zstd's entropy coder, not its search for repeats.
_CODES: Final = FrameCompressor(min_match=7, hash_log=6)


class Q8Codec:
    """int8 per token and head, as is or compressed by zstd."""

    version = 1
    lossless = False
    calibration = NO_TAG
    parameters = NO_TAG
    dtypes: tuple[str, ...] = FLOAT_DTYPES

    def __init__(self, *, zstd: bool = False) -> None:
        self.name = "q8-zstd" if zstd else "q8"
        self._zstd = zstd

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        elements = bits(values, shape.dtype).reshape(-1, shape.head_dim)
        largest = largest_magnitude(elements, shape.dtype)
        if not np.all(largest <= LARGEST[shape.dtype]):  # false for NaN
            return None
        scales = round_up_bfloat16(largest / np.float32(_LARGEST_CODE))
        divisors = to_float32(scales, "bfloat16")
        divisors[divisors == 0] = 1  # those rows are zero, or so small that they become zero
        quotients = to_float32(elements, shape.dtype) / divisors[:, None]
        # The scale is at least max|x| / 127, so no quotient rounds to more than 127.
        quotients += _ROUNDER
        codes = quotients.view(np.uint32).astype(np.uint8).reshape(-1)
        packed: Buffer = codes.data
        if self._zstd:
            packed = _CODES.compress(codes)
        size = scales.nbytes + len(packed)
        return (scales.view(np.uint8).data, packed) if size < values.size else None

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        rows = shape.elements // shape.head_dim
        start = rows * _SCALE_BYTES
        if len(payload) <= start or (not self._zstd and len(payload) != start + shape.elements):
            raise FrameError(f"a {self.name} payload of {len(payload)} bytes for {rows} rows of {shape.head_dim}")
        scales = read_scales(payload[:start], _LARGEST_CODE, shape.dtype)
        if scales is None:
            raise FrameError(f"a {self.name} payload has a scale that is negative, too large or not a number")
        packed = payload[start:]
        codes = decompress(packed, shape.elements) if self._zstd else np.frombuffer(packed, np.uint8)
        numbers = codes.view(np.int8).reshape(rows, shape.head_dim).astype(np.float32)
        numbers *= scales[:, None]
        round_into(numbers, shape.dtype, bits(out, shape.dtype).reshape(rows, shape.head_dim))
