"""Sections of KV for tests of codecs, and what comes back of them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.packing import TORCH_DTYPES


def section_shape(
    kind: int,
    dtype: str = "bfloat16",
    *,
    layers: tuple[int, int] = (0, 1),
    tokens: tuple[int, int] = (0, 16),
    heads: tuple[int, int] = (0, 2),
    head_dim: int = 16,
) -> SectionShape:
    """A shape; ranges are (start, count)."""
    return SectionShape(kind, dtype, *layers, *tokens, *heads, head_dim)


def dimensions(shape: SectionShape) -> tuple[int, int, int, int]:
    """[layer, token, head, dim]."""
    return shape.layer_count, shape.token_count, shape.head_count, shape.head_dim


def random_section(shape: SectionShape, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Numbers with large and small channels, as keys have them, in the section's dtype."""
    draw = np.random.default_rng(seed)
    channels = np.exp(draw.normal(0, 1, (shape.layer_count, 1, shape.head_count, shape.head_dim)))
    offsets = draw.normal(0, 2, channels.shape)
    numbers = (draw.normal(size=dimensions(shape)) + offsets) * channels * scale
    return torch.from_numpy(numbers.astype(np.float32)).to(TORCH_DTYPES[shape.dtype])


def as_bytes(section: torch.Tensor) -> NDArray[np.uint8]:
    """The section as codecs take it."""
    values: NDArray[np.uint8] = section.contiguous().reshape(-1).view(torch.uint8).numpy()
    return values


def encode(codec: Codec, section: torch.Tensor, shape: SectionShape) -> bytes | None:
    """The payload, or None if the section is to be sent raw."""
    parts = codec.encode(as_bytes(section), shape)
    return None if parts is None else b"".join(parts)


def decode(codec: Codec, payload: bytes, shape: SectionShape) -> torch.Tensor:
    """A payload's section, [layer, token, head, dim]. What it does not fill stays NaN."""
    out = np.full(shape.raw_bytes, 0xFF, np.uint8)
    codec.decode(memoryview(payload), shape, out)
    return torch.from_numpy(out).view(TORCH_DTYPES[shape.dtype]).view(dimensions(shape))
