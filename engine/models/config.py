"""The architecture of a model of the Llama shape, read from ``config.json`` and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.families import FAMILIES, ConfigReader
from engine.models.rope import RopeConfig, parse_rope
from pdcore.errors import ModelError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts in place of some layers' MLP.

    Attributes:
        num_experts, experts_per_token: a token goes to the `experts_per_token` experts of the highest probability.
        intermediate_size: width inside an expert.
        norm_weights: whether the probabilities of the chosen experts are scaled to a sum of one.
        layers: which layers have experts.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_weights: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shapes, constants and features of a model of the Llama shape.

    Attributes:
        hidden_size: width of the residual stream. intermediate_size: width inside the MLP.
        num_heads, num_kv_heads, head_dim: attention; query head h reads KV head ``h // (num_heads // num_kv_heads)``.
        max_position: the longest sequence that the model was made for, in tokens.
        tied_embeddings: the output head is the embedding table.
        qkv_bias, out_bias, mlp_bias: whether the projections have biases.
        qk_norm: whether each head of queries and keys is normalised before it is rotated.
        windows: of each layer; a query sees the last so many positions, its own included; None: all.
        rope_layers: which layers rotate queries and keys.
        moe: the experts of a sparse model.
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
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]
    moe: MoeConfig | None


def read_raw_config(folder: Path) -> dict[str, Any]:
    """The contents of a Hugging Face folder's ``config.json``.

    Raises:
        ModelError: it is missing or malformed.
        UnsupportedModel: the folder holds an adapter beside, which would not be applied.
    """
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise UnsupportedModel(
            f"{adapter}: adapters are not applied; merge it into the model's weights, and remove it"
        )
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: there is no config.json; is this a Hugging Face model folder?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw


def read_config(folder: Path) -> LlamaConfig:
    """Read ``config.json`` of a Hugging Face folder.

    Raises:
        ModelError: it is missing or malformed.
        UnsupportedModel: it describes a model that has no native implementation; says why.
    """
    return parse_config(read_raw_config(folder), folder / "config.json")


def parse_config(raw: dict[str, Any], path: Path) -> LlamaConfig:
    """Check the contents of a ``config.json``; `path` is named in errors, which are those of `read_config`."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or any(name != family.architecture for name in architectures):
        named = ", ".join(architectures) or repr(model_type)
        supported = ", ".join(known.architecture for known in FAMILIES.values())
        raise UnsupportedModel(f"{path}: architecture {named} is not supported; supported: {supported}")
    refuse_quantised(raw, path)
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"{path}: activation {raw['hidden_act']!r} is not supported; supported: silu")

    reader = ConfigReader(raw, path)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    head_dim = reader.integer("head_dim", family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads")
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    rope, max_position = parse_rope(raw, path, family.theta, reader.integer("max_position_embeddings", 2048))
    qkv_bias, out_bias, mlp_bias = family.biases(reader)
    experts = family.experts(reader)
    if experts and experts.experts_per_token > experts.num_experts:
        raise ModelError(f"{path}: {experts.experts_per_token} experts for each token, of {experts.num_experts}")
    return LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=float(raw.get("rms_norm_eps", family.norm_eps)),
        rope=rope,
        tied_embeddings=reader.flag("tie_word_embeddings", family.tied),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        windows=family.windows(reader),
        rope_layers=family.rope_layers(reader),
        moe=MoeConfig(*experts) if experts else None,
    )


def refuse_quantised(raw: dict[str, Any], path: Path) -> None:
    """Raise `ModelError` if the weights are packed: neither implementation reads them."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{path}: quantised weights ({method}) are not supported; use an unquantised checkpoint")
