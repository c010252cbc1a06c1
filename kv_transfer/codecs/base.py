"""What a codec is: bytes of one section in, fewer bytes out, and back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdcore.types import DTYPE_BYTES

Buffer: TypeAlias = bytes | memoryview
"""Contiguous bytes (a memoryview has format ``B``), joinable by ``b"".join``."""


class SectionShape(NamedTuple):
    """What a section holds: K or V as elements [layer_count, token_count, head_count, head_dim], little endian.

    Attributes:
        kind: `frames.KIND_K` or `frames.KIND_V`.
        dtype: a key of `DTYPE_BYTES`.
        token_start: counted from the start of the sequence.
        head_start: counted from the model's first KV head.
    """

    kind: int
    dtype: str
    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    head_start: int
    head_count: int
    head_dim: int

    @property
    def elements(self) -> int:
        """Numbers in the section."""
        return self.layer_count * self.token_count * self.head_count * self.head_dim

    @property
    def raw_bytes(self) -> int:
        """Bytes of the section, decoded."""
        return self.elements * DTYPE_BYTES[self.dtype]


_PARAMETERS: Final = struct.Struct("<HHH10x")


def codec_parameters(*, group: int = 0, sinks: int = 0, window: int = 0) -> bytes:
    """A codec's parameters as frames carry them: tokens or elements of a group, tokens at the front and at the end of
    a sequence that are kept as they are. 0 is none."""
    return _PARAMETERS.pack(group, sinks, window)


class Codec(Protocol):
    """A transformation of one section. Stateless: safe to use from any number of threads at once.

    Attributes:
        name: a key of `frames.CODEC_IDS`. version: of its payload, as in `frames.CODEC_VERSIONS`.
        lossless: what is decoded equals what was encoded, bit for bit.
        dtypes: element types that it can encode.
        calibration: 16 bytes that name what both ends need beside the payload; zero if nothing.
        parameters: 16 bytes of every frame's header; a decoder refuses others than its own.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def calibration(self) -> bytes: ...
    @property
    def parameters(self) -> bytes: ...

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        """Compress a section.

        Args:
            values: uint8 [shape.raw_bytes], contiguous: the section's elements.

        Returns:
            Parts that make up the payload when joined; they may refer to `values`. None if the payload would not be
            smaller than the section, or the section cannot be encoded; it is then sent raw.
        """
        ...

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        """Decompress a payload into `out`, uint8 [shape.raw_bytes], contiguous, filling all of it.

        Never allocates more than a small multiple of ``out.size``, whatever the payload claims.

        Raises:
            FrameError: the payload is malformed or does not decode to exactly ``out.size`` bytes.
        """
        ...
