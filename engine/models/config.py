"""The architecture of a Llama-family model, read from ``config.json`` and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.rope import RopeConfig
from pdcore.errors import ModelError

_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shapes and constants of a Llama model.

    Attributes:
        hidden_size: width of the residual stream. intermediate_size: width inside the MLP.
        num_heads, num_kv_heads, head_dim: attention; query head h reads KV head ``h // (num_heads // num_kv_heads)``.
        max_position: the longest sequence that the model was made for, in tokens.
        tied_embeddings: the output head is the embedding table.
        attention_bias, mlp_bias: whether the projections have biases.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def read_config(folder: Path) -> LlamaConfig:
    """Read ``config.json`` of a Hugging Face folder.

    Raises:
        ModelError: it is missing or malformed, or describes a model that this engine cannot run; says why.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: there is no config.json; is this a Hugging Face model folder?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return parse_config(raw, path)


def parse_config(raw: dict[str, Any], path: Path) -> LlamaConfig:
    """Check the contents of a ``config.json``; `path` is named in errors."""
    _refuse_unsupported(raw, path)

    def integer(key: str, default: int | None = None) -> int:
        value = raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{path}: {key} must be an integer >= 1, got {value!r}")
        return value

    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    kv_heads = integer("num_key_value_heads", heads)
    head_dim = integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads")
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    return LlamaConfig(
        vocab_size=integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size"),
        num_layers=integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=integer("max_position_embeddings", 2048),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, path),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    architectures = raw.get("architectures") or []
    model_type = raw.get("model_type")
    if model_type != "llama" or any(name != "LlamaForCausalLM" for name in architectures):
        named = ", ".join(architectures) or repr(model_type)
        raise ModelError(f"{path}: architecture {named} is not supported; supported: LlamaForCausalLM")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{path}: quantised weights ({method}) are not supported; use an unquantised checkpoint")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{path}: activation {raw['hidden_act']!r} is not supported; supported: silu")


def _rope(raw: dict[str, Any], path: Path) -> RopeConfig:
    """transformers 5 writes ``rope_parameters``; before, it was ``rope_theta`` and ``rope_scaling``."""
    values = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{path}: partial rotary embeddings are not supported")
    theta = float(values.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind == "default":
        return RopeConfig(kind, theta)
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [key for key in needed if key not in values]
    if missing:
        raise ModelError(f"{path}: rope scaling {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return RopeConfig(kind, theta, float(values["factor"]))
    return RopeConfig(
        kind,
        theta,
        float(values["factor"]),
        float(values["low_freq_factor"]),
        float(values["high_freq_factor"]),
        int(values["original_max_position_embeddings"]),
    )
