"""The Llama family, written for batched ragged steps over a paged cache on CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import AttentionPlan, HeadShape, attend, write_kv
from engine.kv_cache import PagedKvCache
from engine.linear import Linear
from engine.models.config import LlamaConfig
from engine.models.rope import rope_tables
from engine.step import StepProgress
from engine.weights import WeightFiles
from pdcore.errors import ModelError

_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints carry it; it follows from the config


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block. `qkv` puts out [q heads | k heads | v heads]; `gate_up` puts out [gate | up]."""

    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights and forward pass.

    Weights are rounded to the storage dtype of the configuration and kept in `compute` dtype; the embedding table
    stays in the mapped file if it has the storage dtype there.
    """

    def __init__(
        self, config: LlamaConfig, weights: WeightFiles, storage: torch.dtype, compute: torch.dtype, max_len: int
    ) -> None:
        """`max_len`: positions are below this. Raises `ModelError` if the weights do not fit the config."""
        self.config = config
        self.compute = compute
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        loader = _Loader(config, weights, storage, compute)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.tensor("model.norm.weight", (config.hidden_size,))
        self._head = loader.head(self._embedding)
        loader.check_all_used()
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, max_len, compute)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        *,
        plan: AttentionPlan,
        cache: PagedKvCache,
        progress: StepProgress,
    ) -> torch.Tensor:
        """One step over T tokens.

        Args:
            token_ids, positions: int64 [T]. sample_rows: int64 [R].
            progress: its `layers_done` is raised as each layer's K and V are in `cache`.

        Returns:
            Logits of the sampled rows: float32 [R, vocab_size].
        """
        config, heads = self.config, self.heads
        q_width = heads.num_heads * heads.head_dim
        qk_heads = heads.num_heads + heads.num_kv_heads
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = F.embedding(token_ids, self._embedding).to(self.compute)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(hidden, layer.input_norm))
            _rotate(qkv[:, : qk_heads * heads.head_dim].view(-1, qk_heads, heads.head_dim), cos, sin)
            write_kv(plan, cache, index, qkv[:, q_width:])
            progress.layers_done = index + 1
            if index + 1 == config.num_layers and len(sample_rows) == 0:
                break  # nobody reads on: the step was to fill the cache
            mixed = attend(plan, cache, index, qkv[:, :q_width], heads)
            if index + 1 == config.num_layers:
                mixed, hidden = mixed[sample_rows], hidden[sample_rows]
            hidden = layer.out.add_to(hidden, mixed)
            gate_up = layer.gate_up(self._normed(hidden, layer.mlp_norm))
            gate, up = gate_up.chunk(2, -1)
            hidden = layer.down.add_to(hidden, F.silu(gate).mul_(up))
        if len(sample_rows) == 0:
            return torch.empty(0, config.vocab_size)
        logits: torch.Tensor = self._head(self._normed(hidden, self._norm)).float()
        return logits

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `heads` [T, heads, head_dim] in place; `cos` and `sin` as `rope_tables` makes them, [T, 1, head_dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    heads.mul_(cos).addcmul_(swapped, sin)


class _Loader:
    """Reads, rounds, fuses and packs the weights, and notes which it used."""

    def __init__(self, config: LlamaConfig, weights: WeightFiles, storage: torch.dtype, compute: torch.dtype) -> None:
        self._config, self._weights = config, weights
        self._storage, self._compute = storage, compute
        self._used: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In compute dtype, after rounding to the storage dtype."""
        return self._stored(name, shape).to(self._compute)

    def embedding(self) -> torch.Tensor:
        """In storage dtype: it is only looked up."""
        return self._stored("model.embed_tokens.weight", (self._config.vocab_size, self._config.hidden_size))

    def head(self, embedding: torch.Tensor) -> Linear:
        if self._config.tied_embeddings:
            self._used.add("lm_head.weight")  # some checkpoints carry the tied copy
            return Linear(embedding.to(self._compute), None)
        return self._linear(["lm_head"], [self._config.vocab_size], self._config.hidden_size, bias=False)

    def layer(self, index: int) -> _Layer:
        config = self._config
        prefix = f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = [f"{prefix}self_attn.{part}_proj" for part in ("q", "k", "v")]
        mlp = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
        return _Layer(
            input_norm=self.tensor(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(attention, [q_rows, kv_rows, kv_rows], hidden, config.attention_bias),
            out=self._linear([prefix + "self_attn.o_proj"], [hidden], q_rows, config.attention_bias),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear(mlp, [inner, inner], hidden, config.mlp_bias),
            down=self._linear([prefix + "mlp.down_proj"], [hidden], inner, config.mlp_bias),
        )

    def check_all_used(self) -> None:
        """A tensor that nothing reads means that the model is not what its config says."""
        unused = sorted(name for name in self._weights.names - self._used if not name.endswith(_IGNORED_SUFFIX))
        if unused:
            raise ModelError(
                f"{self._weights.folder}: {len(unused)} tensors do not belong to a LlamaForCausalLM of this config, "
                f"e.g. {', '.join(unused[:3])}"
            )

    def _linear(self, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        shapes = [(count, columns) for count in rows]
        weights = [self._stored(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)]
        fused = torch.cat(weights).to(self._compute)
        if not bias:
            return Linear(fused, None)
        biases = [self._stored(f"{name}.bias", (count,)) for name, count in zip(names, rows, strict=True)]
        return Linear(fused, torch.cat(biases).to(self._compute))

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weights.get(name, shape).to(self._storage)
        self._used.add(name)
        return tensor
