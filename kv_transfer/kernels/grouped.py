"""`k6v4` and `k4v4` on a device: the torch reference of their kernels.

The payload is that of `kv_transfer.codecs.grouped`, the same codecs for host memory, byte for byte. So divisors are
tensors: torch multiplies by the reciprocal of a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.grouped import GROUP, GroupedLayout, grouped_layout
from kv_transfer.frames import KIND_K
from pdcore.errors import FrameError

LARGEST: Final = {"bfloat16": 1.6e38, "float16": 6.5e4}
"""Magnitudes up to this are encoded: differences and what rounding adds stay finite."""
ROUNDER: Final = 8388608.0
"""2**23: adding it to a small float32 leaves the rounded number in its lowest bits."""


class Parts(NamedTuple):
    """Views of a payload. kept: [layers, tokens, heads * dim], lows, highs: `GroupedLayout.ranges`; in the dtype."""

    kept: torch.Tensor
    lows: torch.Tensor
    highs: torch.Tensor
    nibbles: torch.Tensor
    pairs: torch.Tensor


def split_payload(payload: torch.Tensor, shape: SectionShape, layout: GroupedLayout) -> Parts:
    dtype = getattr(torch, shape.dtype)
    sizes = [layout.kept, layout.range_bytes, layout.range_bytes, layout.nibbles, layout.pairs]
    kept, lows, highs, nibbles, pairs = torch.split(payload, sizes)
    return Parts(
        kept.view(dtype).view(shape.layer_count, layout.kept_tokens, shape.head_count * shape.head_dim),
        lows.view(dtype).view(layout.ranges),
        highs.view(dtype).view(layout.ranges),
        nibbles,
        pairs,
    )


def by_token(values: torch.Tensor, shape: SectionShape) -> torch.Tensor:
    """A section as [layers, tokens, heads * dim]."""
    return values.view(shape.layer_count, shape.token_count, shape.head_count * shape.head_dim)


def code_bits(shape: SectionShape, key_bits: int, value_bits: int) -> int:
    return key_bits if shape.kind == KIND_K else value_bits


def largest_bits(dtype: str) -> int:
    """`LARGEST` as the bits of a float32. Those bits are ordered as magnitudes are."""
    return int(np.float32(LARGEST[dtype]).view(np.int32))


def can_encode(shape: SectionShape, layout: GroupedLayout) -> bool:
    return shape.head_dim % 4 == 0 and layout.payload < shape.raw_bytes


def check_length(payload: torch.Tensor, shape: SectionShape, layout: GroupedLayout) -> None:
    if shape.head_dim % 4 or payload.numel() != layout.payload:
        raise FrameError(f"a payload of {payload.numel()} bytes, where groups take {layout.payload}, for {shape}")


def refuse_ranges() -> FrameError:
    return FrameError("a payload has a group whose range is not one")


def encode(values: torch.Tensor, shape: SectionShape, *, key_bits: int, value_bits: int) -> torch.Tensor | None:
    """`DeviceCodec.encode`, whose arguments are checked already."""
    bits = code_bits(shape, key_bits, value_bits)
    layout = grouped_layout(shape, bits)
    if not can_encode(shape, layout):
        return None
    payload = torch.empty(layout.payload, dtype=torch.uint8, device=values.device)
    parts = split_payload(payload, shape, layout)
    section = by_token(values, shape)
    parts.kept.copy_(section[:, : layout.kept_tokens])
    elements = section[:, layout.kept_tokens :].float()
    if not (elements.abs() <= LARGEST[shape.dtype]).all():  # no comparison with NaN is true
        return None
    codes = torch.empty(layout.members, dtype=torch.int32, device=values.device)
    for group, members in _groups(elements, layout):
        low, high = members.amin(1, keepdim=True), members.amax(1, keepdim=True)
        low, high = (torch.where(bound == 0, 0.0, bound) for bound in (low, high))  # one zero, not two
        span = high - low
        step = torch.full_like(span, (1 << bits) - 1) / span
        step = torch.where(step.isfinite(), step, 0.0)
        rounded = (members - low) * step + ROUNDER
        codes[:, group * GROUP : (group + 1) * GROUP] = rounded.view(torch.int32) & 0xFF
        parts.lows[:, group] = low.squeeze(1)
        parts.highs[:, group] = high.squeeze(1)
    nibbles, pairs = (codes & 0xF).view(-1, 2), (codes >> 4).view(-1, 4)
    parts.nibbles.copy_(nibbles[:, 0] | nibbles[:, 1] << 4)
    if bits == 6:
        parts.pairs.copy_(pairs[:, 0] | pairs[:, 1] << 2 | pairs[:, 2] << 4 | pairs[:, 3] << 6)
    return payload


def decode(payload: torch.Tensor, shape: SectionShape, out: torch.Tensor, *, key_bits: int, value_bits: int) -> None:
    """`DeviceCodec.decode`, whose arguments are checked already."""
    bits = code_bits(shape, key_bits, value_bits)
    layout = grouped_layout(shape, bits)
    check_length(payload, shape, layout)
    parts = split_payload(payload, shape, layout)
    lows, highs = parts.lows.float(), parts.highs.float()
    if not ((lows.abs() <= LARGEST[shape.dtype]) & (highs.abs() <= LARGEST[shape.dtype]) & (lows <= highs)).all():
        raise refuse_ranges()
    codes = torch.stack([parts.nibbles & 0xF, parts.nibbles >> 4], 1).view(-1)
    if bits == 6:
        upper = torch.stack([parts.pairs >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(-1)
        codes |= upper << 4
    numbers = codes.float()
    span = highs - lows
    steps = span / torch.full_like(span, (1 << bits) - 1)
    for group, members in _groups(numbers, layout):
        members.mul_(steps[:, group, None]).add_(lows[:, group, None])
    section = by_token(out, shape)
    section[:, : layout.kept_tokens] = parts.kept
    rest = section[:, layout.kept_tokens :]
    rest.copy_(numbers.view(rest.shape))


def _groups(values: torch.Tensor, layout: GroupedLayout) -> Iterator[tuple[int, torch.Tensor]]:
    """Number of each group along the dimension that is cut, and its elements: a view of `values`, which are all."""
    return enumerate(torch.split(values.view(layout.members), GROUP, 1)) if values.numel() else iter(())
