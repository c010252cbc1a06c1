"""`bexp3` in Triton. The payload is told in `kv_transfer.codecs.bexp3`, the reference in `kv_transfer.kernels.bexp3`.

Encoding::

    _split            words            -> maxima, low plane, bit planes
    _count_escapes    bit planes       -> escapes of each segment      (escaped: where all three bits are 1)
    torch             segment counts   -> the tiles' counts, and a prefix sum: where each segment's escapes end
    _collect_escapes  bit planes, ends -> escapes

Decoding counts in the same way, compares with the counts that the payload states, and `_join` does the rest.

A *segment* is `_SEGMENT` bytes of a plane within a tile, so eight times as many elements; a tile's last one may be
short. Elements are eight to a byte of a plane, so channels must be a multiple of eight: then no byte is shared by
two tokens. Every head dimension in use is such a multiple; for others the reference takes over, on the same device.

Offsets are 64-bit from the tile's start on. The parts of a payload start at multiples of four bytes if channels are a
multiple of 32. Kernels are given offsets of parts in units of `UNIT` bytes, 4 or 1, and so know when they may move
four bytes at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 - Triton's compiler reads the kernels' arguments, which are flat and have no Python types

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.bexp3 import GROUP_TOKENS, Layout
from kv_transfer.kernels import bexp3
from kv_transfer.kernels.backends import launching_on
from kv_transfer.kernels.bexp3 import check_counts, count_escapes, groups_of

_CHANNELS: Final = 64
"""Channels of one program of `_split`."""
_SEGMENT: Final = 256
_NUM_WARPS: Final = 4


def encode(values: torch.Tensor, shape: SectionShape) -> torch.Tensor | None:
    """`DeviceCodec.encode`, whose arguments are checked already."""
    layout = Layout.of(shape)
    if layout.channels % 8:
        return bexp3.encode(values, shape)
    if layout.escapes >= shape.raw_bytes:
        return None
    words = values.view(torch.int16)
    payload = torch.empty(shape.raw_bytes, dtype=torch.uint8, device=values.device)  # a longer one is of no use
    groups, unit = groups_of(layout), _unit(layout)
    with launching_on(values):
        _split[(layout.layers * groups, triton.cdiv(layout.channels, _CHANNELS))](
            words, payload, layout.tokens, groups, layout.maxima // unit, layout.low // unit, layout.planes // unit,
            layout.plane_bytes // unit, CHANNELS=layout.channels, UNIT=unit, GROUP=GROUP_TOKENS, BLOCK=_CHANNELS,
            num_warps=_NUM_WARPS,
        )  # fmt: skip
        segments = _segments(payload, layout)
        payload[: layout.maxima].view(torch.int32).copy_(segments.tile_counts)
        _collect_escapes[segments.grid](
            words, payload, segments.ends, layout.tokens, groups, layout.planes // unit, layout.plane_bytes // unit,
            layout.escapes, shape.raw_bytes, CHANNELS=layout.channels, UNIT=unit, GROUP=GROUP_TOKENS, BLOCK=_SEGMENT,
            num_warps=_NUM_WARPS,
        )  # fmt: skip
    size = layout.escapes + int(segments.ends[-1])  # the one wait for the device
    return payload[:size] if size < shape.raw_bytes else None


def decode(payload: torch.Tensor, shape: SectionShape, out: torch.Tensor) -> None:
    """`DeviceCodec.decode`, whose arguments are checked already."""
    layout = Layout.of(shape)
    if layout.channels % 8:
        return bexp3.decode(payload, shape, out)
    escapes = count_escapes(payload, layout)
    unit = _unit(layout)
    with launching_on(out):
        segments = _segments(payload, layout)
        _join[segments.grid](
            payload, segments.ends, out.view(torch.int16), layout.tokens, groups_of(layout), layout.maxima // unit,
            layout.low // unit, layout.planes // unit, layout.plane_bytes // unit, layout.escapes, payload.numel(),
            CHANNELS=layout.channels, UNIT=unit, GROUP=GROUP_TOKENS, BLOCK=_SEGMENT, num_warps=_NUM_WARPS,
        )  # fmt: skip
    check_counts(payload, segments.tile_counts, escapes)


class _Segments(NamedTuple):
    """`tile_counts` int32 [tiles]; `ends` int32 [tiles * segments of a tile]: escapes up to each segment's end."""

    grid: tuple[int, int]
    tile_counts: torch.Tensor
    ends: torch.Tensor


def _segments(payload: torch.Tensor, layout: Layout) -> _Segments:
    groups, unit = groups_of(layout), _unit(layout)
    grid = (layout.layers * groups, triton.cdiv(GROUP_TOKENS * layout.channels, 8 * _SEGMENT))
    counts = torch.empty(grid, dtype=torch.int32, device=payload.device)
    _count_escapes[grid](
        payload, counts, layout.tokens, groups, layout.planes // unit, layout.plane_bytes // unit,
        CHANNELS=layout.channels, UNIT=unit, GROUP=GROUP_TOKENS, BLOCK=_SEGMENT, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return _Segments(grid, counts.sum(1, dtype=torch.int32), counts.view(-1).cumsum(0, dtype=torch.int32))


def _unit(layout: Layout) -> int:
    return 4 if layout.channels % 32 == 0 else 1


@triton.jit(do_not_specialize=["tokens", "groups", "maxima_at", "low_at", "planes_at", "plane_bytes"])
def _split(
    words,
    payload,
    tokens,
    groups,
    maxima_at,
    low_at,
    planes_at,
    plane_bytes,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maxima, low plane and bit planes of one tile and BLOCK channels.

    Args:
        words: int16 [layers, tokens, CHANNELS]. payload: uint8 [>= escapes_at], written but for counts and escapes.
        tokens: of the section. groups: of a layer. *_at, plane_bytes: the parts of `Layout`, in UNITs.
        Grid: (tiles, ceil(CHANNELS / BLOCK)).
    """
    tile = tl.program_id(0)
    token = tile % groups * GROUP + tl.arange(0, GROUP)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (channel < CHANNELS)[None, :]
    row = (tile // groups).to(tl.int64) * tokens + token
    element = row[:, None] * CHANNELS + channel[None, :]
    # Zeros where there is no token: they leave the maximum as it is.
    word = tl.load(words + element, mask=inside, other=0).to(tl.int32)
    exponent = (word >> 7) & 0xFF
    maximum = tl.max(exponent, axis=0)
    maximum_at = maxima_at.to(tl.int64) * UNIT + tile.to(tl.int64) * CHANNELS + channel
    tl.store(payload + maximum_at, maximum.to(tl.uint8), mask=channel < CHANNELS)
    low = ((word >> 8) & 0x80) | (word & 0x7F)
    tl.store(payload + low_at.to(tl.int64) * UNIT + element, low.to(tl.uint8), mask=inside)

    code = tl.minimum(maximum[None, :] - exponent, 7)
    # The three bits of a code eight apart, so that one sum over eight elements makes the bytes of all three planes.
    spread = (code & 1) | ((code & 2) << 7) | ((code & 4) << 14)
    octets = tl.reshape(spread, (GROUP, BLOCK // 8, 8))
    packed = tl.sum(octets << tl.arange(0, 8)[None, None, :], axis=2)
    octet = tl.program_id(1) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    there = (token < tokens)[:, None] & (octet < CHANNELS // 8)[None, :]
    plane = payload + planes_at.to(tl.int64) * UNIT + row[:, None] * (CHANNELS // 8) + octet[None, :]
    stride = plane_bytes.to(tl.int64) * UNIT
    tl.store(plane, packed.to(tl.uint8), mask=there)
    tl.store(plane + stride, (packed >> 8).to(tl.uint8), mask=there)
    tl.store(plane + 2 * stride, (packed >> 16).to(tl.uint8), mask=there)


@triton.jit
def _popcount(byte):
    """Bits set in each byte, given as int32."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0xF


@triton.jit
def _segment(tokens, groups, CHANNELS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Where this program's segment lies.

    Returns:
        Bytes counted from the start of the tile's part of a plane [BLOCK], which of them are the tile's [BLOCK], and
        the tile's first byte counted from the start of the plane (int64).
    """
    tile = tl.program_id(0)
    group = tile % groups
    octet = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = octet < tl.minimum(tokens - group * GROUP, GROUP) * (CHANNELS // 8)
    first = ((tile // groups).to(tl.int64) * tokens + group * GROUP) * (CHANNELS // 8)
    return octet, inside, first


@triton.jit
def _load_planes(payload, planes_at, plane_bytes, octet, inside, UNIT: tl.constexpr):
    """Bytes `octet` of the three bit planes as int32; zeros where they are not `inside`."""
    plane = payload + planes_at.to(tl.int64) * UNIT + octet
    stride = plane_bytes.to(tl.int64) * UNIT
    bits0 = tl.load(plane, mask=inside, other=0)
    bits1 = tl.load(plane + stride, mask=inside, other=0)
    bits2 = tl.load(plane + 2 * stride, mask=inside, other=0)
    return bits0.to(tl.int32), bits1.to(tl.int32), bits2.to(tl.int32)


@triton.jit
def _rank_escapes(escapes, ends):
    """For each of a segment's elements: how many escapes the section has before it.

    Args:
        escapes: int32 [BLOCK], a bit for each element. ends: int32 [grid], escapes up to the end of each segment.

    Returns:
        int32 [BLOCK, 8].
    """
    count = _popcount(escapes)
    end = tl.load(ends + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    before = end - tl.sum(count) + tl.cumsum(count, 0) - count
    lower = (1 << tl.arange(0, 8)) - 1
    return before[:, None] + _popcount(escapes[:, None] & lower[None, :])


@triton.jit(do_not_specialize=["tokens", "groups", "planes_at", "plane_bytes"])
def _count_escapes(
    payload,
    counts,
    tokens,
    groups,
    planes_at,
    plane_bytes,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Escapes of one segment.

    Args:
        payload: uint8, of which the bit planes are read. counts: int32 [grid], written.
        tokens: of the section. groups: of a layer. planes_at, plane_bytes: see `Layout`, in UNITs.
        Grid: (tiles, segments of a full tile).
    """
    octet, inside, first = _segment(tokens, groups, CHANNELS, GROUP, BLOCK)
    bits0, bits1, bits2 = _load_planes(payload, planes_at, plane_bytes, first + octet, inside, UNIT)
    count = tl.sum(_popcount(bits0 & bits1 & bits2))
    tl.store(counts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), count)


@triton.jit(do_not_specialize=["tokens", "groups", "planes_at", "plane_bytes", "escapes_at", "capacity"])
def _collect_escapes(
    words,
    payload,
    ends,
    tokens,
    groups,
    planes_at,
    plane_bytes,
    escapes_at,
    capacity,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the exponents of one segment's escaped elements to their places.

    Args:
        words: int16 [layers, tokens, CHANNELS]. payload: uint8 [capacity]: bit planes are read, escapes written as
            far as they fit. ends: int32 [grid], escapes up to the end of each segment.
        tokens: of the section. groups: of a layer. planes_at, plane_bytes, escapes_at: see `Layout`, but
            for escapes_at in UNITs.
        Grid: (tiles, segments of a full tile).
    """
    octet, inside, first = _segment(tokens, groups, CHANNELS, GROUP, BLOCK)
    bits0, bits1, bits2 = _load_planes(payload, planes_at, plane_bytes, first + octet, inside, UNIT)
    escapes = bits0 & bits1 & bits2
    rank = _rank_escapes(escapes, ends)
    bit = tl.arange(0, 8)[None, :]
    escaped = ((escapes[:, None] >> bit) & 1) == 1
    word = tl.load(words + (first + octet)[:, None] * 8 + bit, mask=escaped, other=0).to(tl.int32)
    target = escapes_at + rank.to(tl.int64)
    tl.store(payload + target, ((word >> 7) & 0xFF).to(tl.uint8), mask=escaped & (target < capacity))


@triton.jit(
    do_not_specialize=[
        "tokens",
        "groups",
        "maxima_at",
        "low_at",
        "planes_at",
        "plane_bytes",
        "escapes_at",
        "payload_bytes",
    ]
)
def _join(
    payload,
    ends,
    words,
    tokens,
    groups,
    maxima_at,
    low_at,
    planes_at,
    plane_bytes,
    escapes_at,
    payload_bytes,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the elements of one segment together.

    Args:
        payload: uint8 [payload_bytes]; whatever it holds, nothing outside it is read. ends: int32 [grid], escapes up
            to the end of each segment. words: int16 [layers, tokens, CHANNELS], written.
        tokens: of the section. groups: of a layer. *_at, plane_bytes: the parts of `Layout`, in UNITs.
        Grid: (tiles, segments of a full tile).
    """
    octet, inside, first = _segment(tokens, groups, CHANNELS, GROUP, BLOCK)
    bits0, bits1, bits2 = _load_planes(payload, planes_at, plane_bytes, first + octet, inside, UNIT)
    rank = _rank_escapes(bits0 & bits1 & bits2, ends)
    bit = tl.arange(0, 8)[None, :]
    code = ((bits0[:, None] >> bit) & 1) | (((bits1[:, None] >> bit) & 1) << 1) | (((bits2[:, None] >> bit) & 1) << 2)
    there = inside[:, None]
    channel = (octet * 8 % CHANNELS)[:, None] + bit
    maximum_at = maxima_at.to(tl.int64) * UNIT + tl.program_id(0).to(tl.int64) * CHANNELS + channel
    maximum = tl.load(payload + maximum_at, mask=there, other=0).to(tl.int32)
    source = escapes_at + rank.to(tl.int64)
    escape = tl.load(payload + source, mask=(code == 7) & (source < payload_bytes), other=0).to(tl.int32)
    exponent = tl.where(code == 7, escape, (maximum - code) & 0xFF)
    element = (first + octet)[:, None] * 8 + bit
    low = tl.load(payload + low_at.to(tl.int64) * UNIT + element, mask=there, other=0).to(tl.int32)
    word = ((low & 0x80) << 8) | (exponent << 7) | (low & 0x7F)
    tl.store(words + element, word.to(tl.int16), mask=there)
