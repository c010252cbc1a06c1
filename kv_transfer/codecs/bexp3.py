"""`bexp3`: lossless compression of bfloat16 by fixed-length codes for exponents; as fast as memory, on CPU or GPU.

The exponents of one channel hardly change from token to token. Each is sent as its distance to the largest of its
channel and tile (up to `GROUP_TOKENS` tokens of one layer), in three bits; a distance of 7 or more escapes::

    element    s eeeeeeee mmmmmmm     low byte = smmmmmmm, code = min(maximum - e, 7)

    payload = | u32 number of escapes of each tile             4 * tiles
              | maxima, [tile, channel]                        tiles * channels
              | low plane, element order                       n
              | plane 0 | plane 1 | plane 2                    ceil(n / 8) each
              | exponents of escaped elements, element order   1 each

Bit ``i % 8`` (from the lowest) of byte ``i // 8`` of plane p is bit p of the code of element i; bits behind the last
element are zero. Channels are (head, dim), tiles are ordered by layer and then by token. Native code, the numpy code
here, and the Triton kernel give the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape, codec_parameters
from kv_transfer.codecs.word_split import join_words, split_words
from kv_transfer.frames import NO_TAG
from kv_transfer.native.library import NativeKernels, native_kernels
from pdcore.errors import FrameError

GROUP_TOKENS: Final = 64
"""Tokens of a tile, counted from the section's first; only the last tile of a layer has fewer."""

_ESCAPE = 7
# What `NativeKernels.bexp3_decode` answers.
_DECODED, _WRONG_LENGTH, _WRONG_ESCAPES, _WRONG_PADDING = range(4)
_FAULTS = {
    _WRONG_LENGTH: "its length does not fit",
    _WRONG_ESCAPES: "its escapes are not those that it announces",
    _WRONG_PADDING: "its padding is not zero",
}


class Layout(NamedTuple):
    """Geometry of a section, and where the parts of its payload start, in bytes."""

    layers: int
    tokens: int
    channels: int
    elements: int
    plane_bytes: int
    maxima: int
    low: int
    planes: int
    escapes: int

    @staticmethod
    def of(shape: SectionShape) -> Layout:
        return _layout(shape.layer_count, shape.token_count, shape.head_count * shape.head_dim)


@functools.lru_cache(maxsize=64)
def _layout(layers: int, tokens: int, channels: int) -> Layout:
    tiles = layers * -(-tokens // GROUP_TOKENS)
    elements = layers * tokens * channels
    plane_bytes = -(-elements // 8)
    low = tiles * (4 + channels)
    planes = low + elements
    return Layout(
        layers=layers,
        tokens=tokens,
        channels=channels,
        elements=elements,
        plane_bytes=plane_bytes,
        maxima=4 * tiles,
        low=low,
        planes=planes,
        escapes=planes + 3 * plane_bytes,
    )


class Bexp3Codec:
    """Exponents as 3-bit distances from their channel's largest, sign and mantissa raw.

    Args:
        kernels: asked at each call for native code; None from it means numpy.
    """

    name = "bexp3"
    version = 1
    lossless = True
    dtypes: tuple[str, ...] = ("bfloat16",)
    calibration = NO_TAG
    parameters = codec_parameters(group=GROUP_TOKENS)

    def __init__(self, kernels: Callable[[], NativeKernels | None] = native_kernels) -> None:
        self._kernels = kernels

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        layout = Layout.of(shape)
        # Room for an escape of every element, though only noise has so many; what is not written to costs nothing.
        payload = np.empty(layout.escapes + layout.elements + 4, np.uint8)
        kernels = self._kernels()
        if kernels is not None:
            size = kernels.bexp3_encode(values, layout[:3], GROUP_TOKENS, payload)
        else:
            size = _encode(values, layout, payload)
        return (payload[:size].data,) if size < values.size else None

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        layout = Layout.of(shape)
        data = np.frombuffer(payload, np.uint8)
        kernels = self._kernels()
        if kernels is not None:
            status = kernels.bexp3_decode(data, layout[:3], GROUP_TOKENS, out)
        else:
            status = _decode(data, layout, out)
        if status != _DECODED:
            size = f"{data.size} bytes for {layout.elements} elements"
            raise FrameError(f"a bexp3 payload of {size}: {_FAULTS[status]}")


def _encode(values: NDArray[np.uint8], layout: Layout, payload: NDArray[np.uint8]) -> int:
    """What `NativeKernels.bexp3_encode` does."""
    layers, tokens, channels = layout[:3]
    exponents, low = split_words(values, None)
    rows: NDArray[np.uint8] = exponents.reshape(layers, tokens, channels)
    starts = np.arange(0, tokens, GROUP_TOKENS)
    maxima = np.maximum.reduceat(rows, starts, axis=1)
    codes = np.repeat(maxima, np.diff(starts, append=tokens), axis=1)
    np.subtract(codes, rows, out=codes)
    np.minimum(codes, _ESCAPE, out=codes)
    escaped = codes == _ESCAPE
    counts = np.add.reduceat(np.count_nonzero(escaped, axis=2), starts, axis=1)
    payload[: layout.maxima] = counts.astype("<u4").reshape(-1).view(np.uint8)
    payload[layout.maxima : layout.low] = maxima.reshape(-1)
    payload[layout.low : layout.planes] = low
    planes = payload[layout.planes : layout.escapes].reshape(3, -1)
    for bit in range(3):
        planes[bit] = np.packbits(codes.reshape(-1) & 1 << bit, bitorder="little")
    size = layout.escapes + int(counts.sum())
    payload[layout.escapes : size] = rows[escaped]
    return size


def _decode(payload: NDArray[np.uint8], layout: Layout, out: NDArray[np.uint8]) -> int:
    """What `NativeKernels.bexp3_decode` does, in the same order."""
    layers, tokens, channels = layout[:3]
    if payload.size < layout.escapes:
        return _WRONG_LENGTH
    counts = payload[: layout.maxima].view("<u4").reshape(layers, -1)
    escapes = payload[layout.escapes :]
    if counts.sum(dtype=np.uint64) != escapes.size:
        return _WRONG_LENGTH
    planes = payload[layout.planes : layout.escapes].reshape(3, -1)
    if layout.elements % 8 and np.any(planes[:, -1] >> layout.elements % 8):
        return _WRONG_PADDING
    bits = np.unpackbits(planes, axis=1, count=layout.elements, bitorder="little")
    codes = (bits[0] | bits[1] << 1 | bits[2] << 2).reshape(layers, tokens, channels)
    starts = np.arange(0, tokens, GROUP_TOKENS)
    escaped = codes == _ESCAPE
    if np.any(np.add.reduceat(np.count_nonzero(escaped, axis=2), starts, axis=1) != counts):
        return _WRONG_ESCAPES
    maxima = payload[layout.maxima : layout.low].reshape(layers, -1, channels)
    exponents = np.repeat(maxima, np.diff(starts, append=tokens), axis=1)
    np.subtract(exponents, codes, out=exponents)
    exponents[escaped] = escapes
    join_words(exponents.reshape(-1), payload[layout.low : layout.planes], out, None)
    return _DECODED
