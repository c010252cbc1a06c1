"""Small codes packed into bytes and back: pairs and quadruples of neighbours, the first in the lowest bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes below 16, two to a byte: uint8 [2 n] -> [n]."""
    words: NDArray[np.uint16] = codes.view("<u2")
    return (words | (words >> np.uint16(4))).astype(np.uint8)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse."""
    words = packed.astype("<u2")
    words |= words << np.uint16(4)
    words &= np.uint16(0x0F0F)
    return words.view(np.uint8)


def pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes below 4, four to a byte: uint8 [4 n] -> [n]."""
    words: NDArray[np.uint32] = codes.view("<u4")
    folded = words | (words >> np.uint32(6))
    folded |= folded >> np.uint32(12)
    return folded.astype(np.uint8)


def unpack_pairs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse."""
    words = packed.astype("<u4")
    words |= words << np.uint32(12)
    words |= words << np.uint32(6)
    words &= np.uint32(0x03030303)
    return words.view(np.uint8)
