"""16-bit floats to two planes of bytes and back; native code or numpy, to the same bytes.

::

    bfloat16   s eeeeeeee mmmmmmm       high byte = bits 14..7            eeeeeeee
    float16    s eeeee mmm mmmmmmm      high byte = bits 14..7            eeeeemmm
                                        low byte  = bit 15, bits 6..0     smmmmmmm
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_transfer.native.library import NativeKernels

_SIGN_AND_LOW = np.int16(-0x7F81)  # 0x807f: the bits of an element that the low byte carries


def split_words(
    values: NDArray[np.uint8], kernels: NativeKernels | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """High bytes and low bytes, [n] each, of `values`, uint8 [2 n], contiguous."""
    if kernels is not None:
        high, low = np.empty((2, values.size // 2), np.uint8)
        kernels.split(values, high, low)
        return high, low
    words = values.view("<u2")
    shifted = np.right_shift(words, 7)
    high = shifted.astype(np.uint8)  # the conversion keeps the low eight bits
    low = np.right_shift(shifted, 1, out=shifted).astype(np.uint8)
    np.bitwise_and(low, 0x80, out=low)
    mantissa = words.astype(np.uint8)
    np.bitwise_and(mantissa, 0x7F, out=mantissa)
    np.bitwise_or(low, mantissa, out=low)
    return high, low


def join_words(
    high: NDArray[np.uint8], low: NDArray[np.uint8], out: NDArray[np.uint8], kernels: NativeKernels | None
) -> None:
    """The inverse of `split_words`: fills `out`, uint8 [2 n], contiguous."""
    if kernels is not None:
        kernels.join(high, low, out)
        return
    words = out.view("<i2")
    # Sign extension of the low byte puts its top bit at bit 15, where the sign belongs.
    np.copyto(words, low.view(np.int8))
    np.bitwise_and(words, _SIGN_AND_LOW, out=words)
    shifted = high.astype("<i2")
    np.left_shift(shifted, 7, out=shifted)
    np.bitwise_or(words, shifted, out=words)
