"""Rotary position embedding: parameters, frequencies and the cos/sin tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdcore.errors import ModelError, UnsupportedModel

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary parameters of a model.

    Attributes:
        kind: ``default``, ``linear`` (positions divided by `factor`), ``llama3`` (low frequencies divided by
            `factor`, high ones kept, those between blended) or ``yarn`` (the same with other bounds, and cos and sin
            scaled).
        theta: base of the frequencies.
        low_freq_factor, high_freq_factor, original_max_position: bounds of the blend, for ``llama3``.
        beta_fast, beta_slow, truncate: bounds of the blend for ``yarn``, in turns within the original context; and
            whether they are widened to whole pairs.
        attention_factor: cos and sin are multiplied by it.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def parse_rope(raw: dict[str, Any], path: Path, theta: float, max_position: int) -> tuple[RopeConfig, int]:
    """The rotary parameters of a ``config.json``, and the longest sequence in tokens that the model takes with them.

    transformers 5 writes ``rope_parameters``; before, it was ``rope_theta`` and ``rope_scaling``.

    Args:
        theta: what holds if the config gives no base. max_position: its ``max_position_embeddings``.

    Raises:
        ModelError: a parameter is missing or malformed.
        UnsupportedModel: the kind of scaling is not implemented.
    """
    values = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModel(f"{path}: rotary embeddings that differ between layers are not supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KINDS:
        raise UnsupportedModel(f"{path}: rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(f"{path}: partial rotary embeddings are not supported")
    values = {**values, "rope_theta": values.get("rope_theta") or raw.get("rope_theta") or theta}
    if raw.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    needed = {
        "linear": ["factor"],
        "dynamic": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    }
    missing = [key for key in needed.get(kind, ()) if values.get(key) is None]
    if missing:
        raise ModelError(f"{path}: rope scaling {kind!r} lacks {', '.join(missing)}")
    try:
        return _rope_of(kind, values, max_position)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: the parameters of rope scaling {kind!r} are malformed: {error}") from error


def _rope_of(kind: str, values: dict[str, Any], max_position: int) -> tuple[RopeConfig, int]:
    theta = float(values["rope_theta"])
    if kind in ("default", "dynamic"):
        # Dynamic scaling begins beyond the length that the model was made for, which no sequence reaches here: there,
        # frequencies would depend on the length, and KV could be neither cached nor moved.
        return RopeConfig("default", theta), max_position
    if kind == "linear":
        return RopeConfig(kind, theta, float(values["factor"])), max_position
    original = int(values.get("original_max_position_embeddings") or max_position)
    if kind == "llama3":
        blend = float(values["low_freq_factor"]), float(values["high_freq_factor"])
        return RopeConfig(kind, theta, float(values["factor"]), *blend, original), max_position
    factor = float(values.get("factor") or max_position / original)
    rope = RopeConfig(
        kind,
        theta,
        factor,
        original_max_position=original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )
    # Many configs keep the original length in max_position_embeddings when scaling is switched on.
    return rope, max(max_position, int(factor * original))


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    given = values.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    part, whole = values.get("mscale"), values.get("mscale_all_dim")
    return magnitude(float(part)) / magnitude(float(whole)) if part and whole else magnitude(1.0)


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
    if config.kind == "yarn":
        kept = _yarn_kept(config, head_dim)
        return (1 - kept) * frequencies / config.factor + kept * frequencies
    return frequencies


def _yarn_kept(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """How much of each frequency stays as it is: 1 for the fast ones, 0 for the slow ones. [head_dim / 2]."""

    def pair_of(turns: float) -> float:
        """Index of the pair that makes `turns` full rotations within the original context."""
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    return 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)


def rope_tables(
    config: RopeConfig, head_dim: int, max_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for ``x * cos + roll(x, head_dim / 2) * sin``, which is the half-split rotation.

    Returns:
        cos and sin in `dtype` [max_len, head_dim]; the first half of sin is negated, for the roll puts the second
        half of x there without its sign.
    """
    angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(config, head_dim))
    cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
