"""`bexp3` on a device: the torch reference of its kernels.

The payload is that of `kv_transfer.codecs.bexp3`, the same codec for host memory, byte for byte; its `Layout` says
what is where. A tile, a layer's group of up to `GROUP_TOKENS` tokens, is contiguous in a section: [tokens, channels].
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.bexp3 import GROUP_TOKENS, Layout
from pdcore.errors import FrameError

ESCAPE: Final = 7


def groups_of(layout: Layout) -> int:
    """Tiles of a layer."""
    return -(-layout.tokens // GROUP_TOKENS)


def encode(values: torch.Tensor, shape: SectionShape) -> torch.Tensor | None:
    """`DeviceCodec.encode`, whose arguments are checked already."""
    layout = Layout.of(shape)
    words = values.view(torch.int16).view(layout.layers, layout.tokens, layout.channels).to(torch.int32)
    exponents = words >> 7 & 0xFF
    maxima = _by_tile(exponents, layout).amax(2)
    codes = (_per_token(maxima, layout) - exponents).clamp_max(ESCAPE)
    escaped = codes == ESCAPE
    parts = [
        _by_tile(escaped, layout).sum((2, 3), dtype=torch.int32).view(-1).view(torch.uint8),
        maxima.to(torch.uint8),
        (words >> 8 & 0x80 | words & 0x7F).to(torch.uint8),
        _to_planes(codes.view(-1), layout),
        exponents[escaped].to(torch.uint8),
    ]
    payload = torch.cat([part.reshape(-1) for part in parts])
    return payload if payload.numel() < shape.raw_bytes else None


def decode(payload: torch.Tensor, shape: SectionShape, out: torch.Tensor) -> None:
    """`DeviceCodec.decode`, whose arguments are checked already."""
    layout = Layout.of(shape)
    escapes = count_escapes(payload, layout)
    maxima = payload[layout.maxima : layout.low].view(layout.layers, -1, layout.channels)
    low = payload[layout.low : layout.planes].to(torch.int32)
    planes = payload[layout.planes : layout.escapes].view(3, layout.plane_bytes)
    bits = (planes.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=payload.device) & 1).view(3, -1)
    if bits[:, layout.elements :].any():
        raise FrameError("bits behind the last element of a bexp3 payload are not zero")
    bits = bits[:, : layout.elements]
    codes = bits[0] | bits[1] << 1 | bits[2] << 2
    escaped = codes == ESCAPE
    check_counts(payload, _by_tile(escaped.view(layout.layers, layout.tokens, -1), layout).sum((2, 3)), escapes)
    exponents = (_per_token(maxima, layout).reshape(-1) - codes).to(torch.int32)  # modulo 256, as uint8
    exponents[escaped] = payload[layout.escapes :].to(torch.int32)
    words = (low & 0x80) << 8 | exponents << 7 | low & 0x7F
    out.view(torch.int16).view(-1).copy_(words)


def count_escapes(payload: torch.Tensor, layout: Layout) -> int:
    """How many the payload has, by its length; FrameError if no payload of this layout has that length."""
    escapes = payload.numel() - layout.escapes
    if not 0 <= escapes <= layout.elements:
        raise FrameError(
            f"a bexp3 payload of {payload.numel()} bytes for {layout.elements} elements, which take {layout.escapes} "
            "and at most one more each"
        )
    return escapes


def check_counts(payload: torch.Tensor, tile_counts: torch.Tensor, escapes: int) -> None:
    """Compare the payload's escape counts with those of its codes. Waits for the device.

    Args:
        tile_counts: integers [layers, groups] or [tiles]. escapes: bytes that the payload has for them.

    Raises:
        FrameError: a count differs, or their sum is not `escapes`.
    """
    counts = tile_counts.view(-1)
    stated = payload[: 4 * counts.numel()].view(torch.int32)
    wrong = (stated != counts).any() | (counts.sum() != escapes)
    if wrong.item():
        raise FrameError("the escapes of a bexp3 payload are not as many as its codes say")


def _by_tile(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[layers, tokens, channels] to [layers, groups, GROUP_TOKENS, channels]; the last group is filled with zeros."""
    groups = groups_of(layout)
    filled = pad(values, (0, 0, 0, groups * GROUP_TOKENS - layout.tokens))
    return filled.view(layout.layers, groups, GROUP_TOKENS, layout.channels)


def _per_token(maxima: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[layers, groups, channels] to [layers, tokens, channels]: each token has its group's."""
    return maxima.repeat_interleave(GROUP_TOKENS, 1)[:, : layout.tokens]


def _to_planes(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """int32 [n] to uint8 [3, ceil(n / 8)]."""
    octets = pad(codes, (0, 8 * layout.plane_bytes - layout.elements)).view(-1, 8)
    position = torch.arange(8, dtype=torch.int32, device=codes.device)
    planes = [((octets >> plane & 1) << position).sum(1) for plane in range(3)]
    return torch.stack(planes).to(torch.uint8)
