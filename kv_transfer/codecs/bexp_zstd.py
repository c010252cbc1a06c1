"""`bexp-zstd`: lossless compression of 16-bit floats by their exponents.

The exponents of a KV cache take few values; its signs and mantissas are noise. Each element is split into two
bytes, which go to two planes::

    bfloat16   s eeeeeeee mmmmmmm       high byte = bits 14..7    eeeeeeee
    float16    s eeeee mmm mmmmmmm      high byte = bits 14..7    eeeeemmm
                                        low byte  = bit 15, bits 6..0    smmmmmmm

    payload = low plane, n bytes as they are | high plane, one zstd frame of n bytes        (n elements)

The high plane is compressed at zstd level 1 with matches made rare (`min_match`, `hash_log`): what pays is its
entropy coder; looking for repeats costs time, and the short ones it finds cost more than the literals they replace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape
from kv_transfer.codecs.bounded_zstd import compress, decompress
from kv_transfer.frames import NO_TAG
from pdcore.errors import FrameError

_SIGN_AND_LOW = np.int16(-0x7F81)  # 0x807f: the bits of an element that the low byte carries


class BexpZstdCodec:
    """Exponent plane by zstd, sign and mantissa raw."""

    name = "bexp-zstd"
    version = 1
    lossless = True
    calibration = NO_TAG
    parameters = NO_TAG
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        words = values.view("<u2")
        shifted = np.right_shift(words, 7)
        high = shifted.astype(np.uint8)  # the conversion keeps the low eight bits
        low = np.right_shift(shifted, 1, out=shifted).astype(np.uint8)
        np.bitwise_and(low, 0x80, out=low)
        mantissa = words.astype(np.uint8)
        np.bitwise_and(mantissa, 0x7F, out=mantissa)
        np.bitwise_or(low, mantissa, out=low)
        # Contexts and parameters are built per call: neither may be shared between threads.
        packed = compress(
            high, zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8, write_content_size=True)
        )
        if low.size + len(packed) >= values.size:
            return None
        return low.data, packed

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        count = out.size // 2
        if len(payload) <= count:
            raise FrameError(f"a bexp-zstd payload of {len(payload)} bytes for {count} elements")
        low = np.frombuffer(payload[:count], np.int8)
        high = decompress(payload[count:], count)
        words = out.view("<i2")
        # Sign extension of the low byte puts its top bit at bit 15, where the sign belongs.
        np.copyto(words, low)
        np.bitwise_and(words, _SIGN_AND_LOW, out=words)
        shifted = high.astype("<i2")
        np.left_shift(shifted, 7, out=shifted)
        np.bitwise_or(words, shifted, out=words)
