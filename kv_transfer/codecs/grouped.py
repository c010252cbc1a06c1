"""`k6v4` and `k4v4`: six or four bits per element of K, four of V, in groups of up to 64 elements.

The first tokens of a sequence are kept as they are (`sinks`). The elements of the rest, [layer, token, head, dim],
are cut into groups, each with a range of its own:

    K   one channel (head, dim) over up to 64 tokens, counted from the section's first token that is not kept:
        keys have channels that are large on every token, which would set the step for all others
    V   one token and head over up to 64 dims, counted from the head's first

The last group of either kind is as long as what is left. A section that is cut short has shorter groups of keys,
which makes its payload longer and its error smaller.

::

    lo, hi  = least and greatest element of a group, in the source dtype
    levels  = 63 for six bits, 15 for four
    q       = (x - lo) * (levels / (hi - lo)) in float32, rounded to nearest, ties to even;
              0 where levels / (hi - lo) is not finite
    payload = | kept tokens, in section order               |  source dtype
              | lo of every group | hi of every group       |  source dtype; K in order (layer, group, head, dim),
              |                                             |                V in order (layer, token, head, group)
              | nibbles: q & 15, two elements to a byte     |  n / 2 bytes
              | pairs: q >> 4, four elements to a byte      |  n / 4 bytes; six bits only
    x'      = lo + q * ((hi - lo) / levels) in float32, rounded to the dtype

Codes are in section order over all n elements that are not kept, the earlier element in the lower bits of a byte.

A section with an element that is not finite or is too large for ``hi - lo`` is sent raw, as is one whose head_dim is
not a multiple of four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape, codec_parameters
from kv_transfer.codecs.bitpack import pack_nibbles, pack_pairs, unpack_nibbles, unpack_pairs
from kv_transfer.codecs.floats import bits, round_into, to_float32
from kv_transfer.codecs.sinks import SINK_TOKENS, by_token, kept_tokens
from kv_transfer.frames import KIND_K, NO_TAG
from pdcore.errors import FrameError

GROUP: Final = 64

_ELEMENT_BYTES: Final = 2
# Adding it leaves a float32 whose last bits are the number rounded to nearest, ties to even.
_ROUNDER: Final = np.float32(1 << 23)
# Magnitudes up to this are encoded: hi - lo and what rounding adds stay finite.
_LARGEST: Final = MappingProxyType({"bfloat16": 1.6e38, "float16": 6.5e4})


class GroupedLayout(NamedTuple):
    """The parts of a payload.

    Attributes:
        kept_tokens: of every layer.
        members: shape of what is not kept, with the dimensions merged around the one that is cut into groups:
            [layers, tokens, heads * dim] for K, [layers * tokens * heads, dim, 1] for V.
        ranges: shape of the groups, [outer, groups, inner].
        kept, range_bytes, nibbles, pairs: bytes of each part; ranges come twice, lo and hi.
    """

    kept_tokens: int
    members: tuple[int, int, int]
    ranges: tuple[int, int, int]
    kept: int
    range_bytes: int
    nibbles: int
    pairs: int

    @property
    def payload(self) -> int:
        """Bytes of all parts."""
        return self.kept + 2 * self.range_bytes + self.nibbles + self.pairs


def grouped_layout(shape: SectionShape, code_bits: int) -> GroupedLayout:
    """Where the parts of a payload of `code_bits` (4 or 6) per element are."""
    kept = kept_tokens(shape)
    tokens, channels = shape.token_count - kept, shape.head_count * shape.head_dim
    if shape.kind == KIND_K:
        members = (shape.layer_count, tokens, channels)
    else:
        members = (shape.layer_count * tokens * shape.head_count, shape.head_dim, 1)
    outer, cut, inner = members
    groups = -(-cut // GROUP)
    elements = outer * cut * inner
    return GroupedLayout(
        kept_tokens=kept,
        members=members,
        ranges=(outer, groups, inner),
        kept=shape.layer_count * kept * channels * _ELEMENT_BYTES,
        range_bytes=outer * groups * inner * _ELEMENT_BYTES,
        nibbles=elements // 2,
        pairs=elements // 4 if code_bits == 6 else 0,
    )


class GroupedCodec:
    """Codes of a few bits between the least and the greatest element of each group."""

    version = 1
    lossless = False
    calibration = NO_TAG
    parameters = codec_parameters(group=GROUP, sinks=SINK_TOKENS)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def __init__(self, name: str, *, key_bits: int, value_bits: int) -> None:
        """`key_bits`, `value_bits`: 4 or 6."""
        assert {key_bits, value_bits} <= {4, 6}, (key_bits, value_bits)
        self.name = name
        self._key_bits, self._value_bits = key_bits, value_bits

    def code_bits(self, shape: SectionShape) -> int:
        """Bits per code of a section."""
        return self._key_bits if shape.kind == KIND_K else self._value_bits

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        code_bits = self.code_bits(shape)
        layout = grouped_layout(shape, code_bits)
        if shape.head_dim % 4 or layout.payload >= values.size:
            return None
        levels, largest = np.float32((1 << code_bits) - 1), _LARGEST[shape.dtype]
        section = by_token(bits(values, shape.dtype), shape)
        numbers = to_float32(np.ascontiguousarray(section[:, layout.kept_tokens :]), shape.dtype)
        numbers = numbers.reshape(layout.members)
        low, high = np.empty(layout.ranges, np.float32), np.empty(layout.ranges, np.float32)
        for members, group in _groups(layout):
            np.min(numbers[:, members], axis=1, out=low[:, group])
            np.max(numbers[:, members], axis=1, out=high[:, group])
        low += np.float32(0)  # one zero, not two: which of them a minimum yields is the implementation's choice
        high += np.float32(0)
        if not (np.all(low >= -largest) and np.all(high <= largest)):  # NaN fails every comparison
            return None
        with np.errstate(divide="ignore", over="ignore"):
            steps = levels / (high - low)
        steps[~np.isfinite(steps)] = 0
        codes = np.empty(layout.members, np.uint8)
        for members, group in _groups(layout):
            part = numbers[:, members]
            part -= low[:, group, None]
            part *= steps[:, group, None]
            part += _ROUNDER
            np.copyto(codes[:, members], part.view(np.uint32), casting="unsafe")
        ranges = np.empty((2, *layout.ranges), "<u2")
        round_into(low, shape.dtype, ranges[0])  # exact: they are elements
        round_into(high, shape.dtype, ranges[1])
        flat = codes.reshape(-1)
        parts = [np.ascontiguousarray(section[:, : layout.kept_tokens]), ranges]
        if code_bits == 6:
            pairs = pack_pairs(flat >> np.uint8(4))
            flat &= np.uint8(15)
            parts += [pack_nibbles(flat), pairs]
        else:
            parts.append(pack_nibbles(flat))
        return [part.reshape(-1).view(np.uint8).data for part in parts if part.size]

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        code_bits = self.code_bits(shape)
        layout = grouped_layout(shape, code_bits)
        if shape.head_dim % 4 or len(payload) != layout.payload:
            raise FrameError(f"a {self.name} payload of {len(payload)} bytes for {shape}")
        data = np.frombuffer(payload, np.uint8)
        kept, ranges, nibbles, pairs = np.split(
            data, np.cumsum([layout.kept, 2 * layout.range_bytes, layout.nibbles])
        )
        section = by_token(bits(out, shape.dtype), shape)
        section[:, : layout.kept_tokens] = bits(kept, shape.dtype).reshape(
            shape.layer_count, layout.kept_tokens, section.shape[2]
        )
        low, high = to_float32(bits(ranges, shape.dtype), shape.dtype).reshape(2, *layout.ranges)
        largest = _LARGEST[shape.dtype]
        if not (np.all(low >= -largest) and np.all(high <= largest) and np.all(low <= high)):
            raise FrameError(f"a {self.name} payload has a range that is not one")
        steps = (high - low) / np.float32((1 << code_bits) - 1)
        flat = unpack_nibbles(nibbles)
        if code_bits == 6:
            upper = unpack_pairs(pairs)
            upper <<= np.uint8(4)
            flat |= upper
        numbers = flat.reshape(layout.members).astype(np.float32)
        for members, group in _groups(layout):
            part = numbers[:, members]
            part *= steps[:, group, None]
            part += low[:, group, None]
        rest = section[:, layout.kept_tokens :]
        round_into(numbers.reshape(rest.shape), shape.dtype, rest)


def _groups(layout: GroupedLayout) -> Iterator[tuple[slice, int]]:
    """The members of each group along the dimension that is cut, and its number."""
    for group, start in enumerate(range(0, layout.members[1], GROUP)):
        yield slice(start, start + GROUP), group
