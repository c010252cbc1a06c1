"""How the model families of the Llama shape differ: what their configs mean, and what they leave unsaid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pdcore.errors import ModelError, UnsupportedModel


class ConfigReader:
    """Checked access to the contents of a ``config.json``; errors name `path`, the key and the value."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    def integer(self, key: str, default: int | None = None) -> int:
        """A number from 1. `default` stands for a key that is missing or null."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.path}: {key} must be an integer >= 1, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} must be true or false, got {value!r}")
        return value

    def per_layer(self, key: str) -> list[Any] | None:
        """A list with an entry for each layer, at least; None if the key is missing or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < self.num_layers:
            raise ModelError(f"{self.path}: {key} must list all {self.num_layers} layers, got {value!r}")
        return value[: self.num_layers]


class Experts(NamedTuple):
    """What `engine.models.config.MoeConfig` is made of."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_weights: bool
    layers: tuple[bool, ...]


Biases = tuple[bool, bool, bool]
"""Of the q, k and v projections; of attention's output; of the MLP."""


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type`` of transformers.

    Attributes:
        architecture: its class. theta, norm_eps, tied, head_dim: what holds where the config says nothing; a
            `head_dim` of None is hidden size by heads.
        biases, windows, rope_layers, experts: read those features; windows and rope_layers one for each layer.
        qk_norm: whether queries and keys are normalised.
    """

    architecture: str
    biases: Callable[[ConfigReader], Biases]
    windows: Callable[[ConfigReader], tuple[int | None, ...]]
    rope_layers: Callable[[ConfigReader], tuple[bool, ...]] = lambda reader: (True,) * reader.num_layers
    experts: Callable[[ConfigReader], Experts | None] = lambda _reader: None
    qk_norm: bool = False
    theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = False
    head_dim: int | None = None


# --------------------------------------------------------------------------------------------------------- biases


def _biases_by_config(reader: ConfigReader) -> Biases:
    attention = reader.flag("attention_bias")
    return attention, attention, reader.flag("mlp_bias")


def _attention_biases_by_config(reader: ConfigReader) -> Biases:
    attention = reader.flag("attention_bias")
    return attention, attention, False


# -------------------------------------------------------------------------------------------------------- windows


def _no_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    return (None,) * reader.num_layers


def _one_window(default: int | None) -> Callable[[ConfigReader], tuple[int | None, ...]]:
    """The same for all layers; `default` if the key is missing. Null is none."""

    def read(reader: ConfigReader) -> tuple[int | None, ...]:
        _refuse_layer_types(reader)
        value = reader.raw.get("sliding_window", default)
        return (None if value is None else reader.integer("sliding_window", default),) * reader.num_layers

    return read


def _switched_window(reader: ConfigReader) -> tuple[int | None, ...]:
    """The same for all layers, if ``use_sliding_window`` says so."""
    _refuse_layer_types(reader)
    return (_window_if_used(reader),) * reader.num_layers


def _window_from_layer(reader: ConfigReader) -> tuple[int | None, ...]:
    """By ``layer_types``, or of the layers from ``max_window_layers`` on."""
    window = _window_if_used(reader)
    if (listed := _windows_by_type(reader, window)) is not None:
        return listed
    if window is None:
        return (None,) * reader.num_layers
    value = reader.raw.get("max_window_layers", 28)
    first = 0 if value == 0 else reader.integer("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(reader.num_layers))


def _window_without_rope(reader: ConfigReader) -> tuple[int | None, ...]:
    """By ``layer_types``, or of the layers that do not rotate."""
    window = _window_if_used(reader)
    if (listed := _windows_by_type(reader, window)) is not None:
        return listed
    return tuple(None if rotates else window for rotates in _rope_by_interval(reader))


def _window_if_used(reader: ConfigReader) -> int | None:
    if not reader.flag("use_sliding_window") or reader.raw.get("sliding_window", 4096) is None:
        return None
    return reader.integer("sliding_window", 4096)


def _windows_by_type(reader: ConfigReader, window: int | None) -> tuple[int | None, ...] | None:
    types = reader.per_layer("layer_types")
    if types is None:
        return None
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"{reader.path}: layers of type {', '.join(unknown)} are not supported")
    if "sliding_attention" in types and window is None:
        raise ModelError(f"{reader.path}: layer_types asks for a sliding window, but none is set and used")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _refuse_layer_types(reader: ConfigReader) -> None:
    if reader.raw.get("layer_types") is not None:
        raise UnsupportedModel(f"{reader.path}: layer_types is not supported for {reader.raw.get('model_type')!r}")


# ----------------------------------------------------------------------------------------------- rotation, experts


def _rope_by_interval(reader: ConfigReader) -> tuple[bool, ...]:
    """By ``no_rope_layers``, in which 1 means that the layer rotates; else all but each fourth or so."""
    listed = reader.per_layer("no_rope_layers")
    if listed is not None:
        return tuple(bool(rotates) for rotates in listed)
    interval = reader.integer("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(reader.num_layers))


def _mixtral_experts(reader: ConfigReader) -> Experts:
    every = (True,) * reader.num_layers
    count, chosen = reader.integer("num_local_experts", 8), reader.integer("num_experts_per_tok", 2)
    return Experts(count, chosen, reader.integer("intermediate_size"), True, every)


def _qwen3_experts(reader: ConfigReader) -> Experts:
    step, dense = reader.integer("decoder_sparse_step", 1), reader.raw.get("mlp_only_layers") or ()
    layers = tuple((layer + 1) % step == 0 and layer not in dense for layer in range(reader.num_layers))
    # transformers 5 writes `num_local_experts`, which is the name within.
    count = reader.integer("num_experts", reader.raw.get("num_local_experts") or 128)
    chosen, inner = reader.integer("num_experts_per_tok", 8), reader.integer("moe_intermediate_size", 768)
    return Experts(count, chosen, inner, reader.flag("norm_topk_prob"), layers)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _biases_by_config, _no_windows),
    "mistral": Family("MistralForCausalLM", lambda _reader: (False, False, False), _one_window(4096)),
    "mixtral": Family(
        "MixtralForCausalLM",
        lambda _reader: (False, False, False),
        _one_window(None),
        experts=_mixtral_experts,
        theta=1e6,
        norm_eps=1e-5,
    ),
    "qwen2": Family("Qwen2ForCausalLM", lambda _reader: (True, False, False), _window_from_layer),
    "qwen3": Family("Qwen3ForCausalLM", _attention_biases_by_config, _window_from_layer, qk_norm=True, head_dim=128),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", _attention_biases_by_config, _switched_window, experts=_qwen3_experts, qk_norm=True
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _biases_by_config,
        _window_without_rope,
        rope_layers=_rope_by_interval,
        theta=2e6,
        tied=True,
    ),
}
"""By ``model_type``."""
