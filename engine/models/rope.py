"""Rotary position embedding: frequencies and the cos/sin tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary parameters of a model.

    Attributes:
        kind: ``default``, ``linear`` (positions divided by `factor`) or ``llama3`` (low frequencies divided by
            `factor`, high ones kept, those between blended).
        theta: base of the frequencies.
        low_freq_factor, high_freq_factor, original_max_position: bounds of the blend, for ``llama3``.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position step of each rotated pair: float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponent)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = config.original_max_position / wavelengths  # full rotations within the original context
        blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / config.factor + blend * frequencies
    return frequencies


def rope_tables(
    config: RopeConfig, head_dim: int, max_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for ``x * cos + roll(x, head_dim / 2) * sin``, which is the half-split rotation.

    Returns:
        cos and sin in `dtype` [max_len, head_dim]; the first half of sin is negated, for the roll puts the second
        half of x there without its sign.
    """
    angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(config, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
