"""`bexp-zstd`: lossless compression of 16-bit floats by their exponents.

The exponents of a KV cache take few values; its signs and mantissas are noise. Each element is split into two
bytes, which go to two planes (`word_split`)::

    payload = low plane, n bytes as they are | high plane, one zstd frame of n bytes        (n elements)

The high plane is compressed at zstd level 1 with matches made rare (`min_match`, `hash_log`): what pays is its
entropy coder; looking for repeats costs time, and the short ones it finds cost more than the literals they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape
from kv_transfer.codecs.bounded_zstd import FrameCompressor, decompress
from kv_transfer.codecs.word_split import join_words, split_words
from kv_transfer.frames import NO_TAG
from kv_transfer.native.library import NativeKernels, native_kernels
from pdcore.errors import FrameError

_HIGH_PLANE: Final = FrameCompressor(min_match=7, hash_log=6)


class BexpZstdCodec:
    """Exponent plane by zstd, sign and mantissa raw.

    Args:
        kernels: asked at each call for native code; None from it means numpy.
    """

    name = "bexp-zstd"
    version = 1
    lossless = True
    calibration = NO_TAG
    parameters = NO_TAG
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def __init__(self, kernels: Callable[[], NativeKernels | None] = native_kernels) -> None:
        self._kernels = kernels

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        high, low = split_words(values, self._kernels())
        packed = _HIGH_PLANE.compress(high)
        if low.size + len(packed) >= values.size:
            return None
        return low.data, packed

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        count = out.size // 2
        if len(payload) <= count:
            raise FrameError(f"a bexp-zstd payload of {len(payload)} bytes for {count} elements")
        low = np.frombuffer(payload[:count], np.uint8)
        join_words(decompress(payload[count:], count), low, out, self._kernels())
