"""The weights of a model of the Llama shape: read, rounded, fused and packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear import Linear
from engine.models.config import LlamaConfig, MoeConfig
from engine.models.mlp import DenseMlp, SparseMlp
from engine.weights import WeightFiles
from pdcore.errors import ModelError

_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints carry it; it follows from the config


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block.

    Attributes:
        qkv: puts out [q heads | k heads | v heads].
        qk_norm: [q heads + k heads, head_dim], factors of the normalised queries and keys; None: no such norm.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    mlp: DenseMlp | SparseMlp


class LlamaWeights:
    """Hands out a model's weights part by part, and notes which tensors it used.

    They are rounded to `storage`, then kept in `compute` dtype. Every method raises `ModelError` if a tensor is
    missing or has another shape.
    """

    def __init__(self, config: LlamaConfig, weights: WeightFiles, storage: torch.dtype, compute: torch.dtype) -> None:
        self._config, self._weights = config, weights
        self._storage, self._compute = storage, compute
        self._used: set[str] = set()

    def final_norm(self) -> torch.Tensor:
        return self._tensor("model.norm.weight", (self._config.hidden_size,))

    def embedding(self) -> torch.Tensor:
        """In storage dtype: it is only looked up."""
        return self._stored("model.embed_tokens.weight", (self._config.vocab_size, self._config.hidden_size))

    def head(self, embedding: torch.Tensor) -> Linear:
        if self._config.tied_embeddings:
            self._used.add("lm_head.weight")  # some checkpoints carry the tied copy
            return Linear(embedding.to(self._compute), None)
        return self._linear(["lm_head"], [self._config.vocab_size], self._config.hidden_size, bias=False)

    def layer(self, index: int) -> LayerWeights:
        config = self._config
        prefix = f"model.layers.{index}."
        hidden = config.hidden_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = [f"{prefix}self_attn.{part}_proj" for part in ("q", "k", "v")]
        sparse = config.moe is not None and config.moe.layers[index]
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(attention, [q_rows, kv_rows, kv_rows], hidden, config.qkv_bias),
            qk_norm=self._qk_norm(prefix) if config.qk_norm else None,
            out=self._linear([prefix + "self_attn.o_proj"], [hidden], q_rows, config.out_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
            mlp=self._sparse_mlp(prefix, config.moe) if sparse and config.moe else self._dense_mlp(prefix),
        )

    def check_all_used(self) -> None:
        """A tensor that nothing reads means that the model is not what its config says."""
        unused = sorted(name for name in self._weights.names - self._used if not name.endswith(_IGNORED_SUFFIX))
        if unused:
            raise ModelError(
                f"{self._weights.folder}: {len(unused)} tensors do not belong to a model of this config, "
                f"e.g. {', '.join(unused[:3])}"
            )

    def _dense_mlp(self, prefix: str) -> DenseMlp:
        config = self._config
        names = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down")]
        return self._gated(names, config.intermediate_size, config.mlp_bias)

    def _sparse_mlp(self, prefix: str, moe: MoeConfig) -> SparseMlp:
        # Checkpoints of Mixtral name the same things in their own way.
        if f"{prefix}block_sparse_moe.gate.weight" in self._weights.names:
            place, parts = f"{prefix}block_sparse_moe.", ("w1", "w3", "w2")
        else:
            place, parts = f"{prefix}mlp.", ("gate_proj", "up_proj", "down_proj")
        experts = [
            self._gated([f"{place}experts.{expert}.{part}" for part in parts], moe.intermediate_size, bias=False)
            for expert in range(moe.num_experts)
        ]
        router = self._linear([place + "gate"], [moe.num_experts], self._config.hidden_size, bias=False)
        return SparseMlp(router, experts, moe.experts_per_token, moe.norm_weights)

    def _gated(self, names: list[str], inner: int, bias: bool) -> DenseMlp:
        """`names` of the gate, up and down projections; `inner` is the width between them."""
        hidden = self._config.hidden_size
        return DenseMlp(
            self._linear(names[:2], [inner, inner], hidden, bias), self._linear(names[2:], [hidden], inner, bias)
        )

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        config = self._config
        q, k = (self._tensor(f"{prefix}self_attn.{part}_norm.weight", (config.head_dim,)) for part in ("q", "k"))
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    def _linear(self, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        shapes = [(count, columns) for count in rows]
        weights = [self._stored(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)]
        fused = torch.cat(weights).to(self._compute)
        if not bias:
            return Linear(fused, None)
        biases = [self._stored(f"{name}.bias", (count,)) for name, count in zip(names, rows, strict=True)]
        return Linear(fused, torch.cat(biases).to(self._compute))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._stored(name, shape).to(self._compute)

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weights.get(name, shape).to(self._storage)
        self._used.add(name)
        return tensor
