"""What a codec is: bytes of one section in, fewer bytes out, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | memoryview
"""Contiguous bytes (a memoryview has format ``B``), joinable by ``b"".join``."""


class Codec(Protocol):
    """A lossless transformation of one section. Stateless: safe to use from any number of threads at once.

    Attributes:
        name: a key of `frames.CODEC_IDS`.
        dtypes: element types that it can encode.
    """

    name: str
    dtypes: tuple[str, ...]

    def encode(self, values: NDArray[np.uint8], dtype: str) -> Sequence[Buffer] | None:
        """Compress a section.

        Args:
            values: uint8 [n], contiguous: the section's elements of type `dtype`, little endian.

        Returns:
            Parts that make up the payload when joined; they may refer to `values`. None if the payload would not be
            smaller than the section, which is then sent raw.
        """
        ...

    def decode(self, payload: memoryview, dtype: str, out: NDArray[np.uint8]) -> None:
        """Decompress a payload into `out`, uint8 [n], contiguous, filling all of it.

        Never allocates more than a small multiple of ``out.size``, whatever the payload claims.

        Raises:
            FrameError: the payload is malformed or does not decode to exactly ``out.size`` bytes.
        """
        ...
