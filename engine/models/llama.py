"""The Llama shape and its close kin, written for batched ragged steps over a paged cache on CPU.

What the families differ in are fields of `LlamaConfig`; what is off costs nothing in the layer loop.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention import HeadShape, attend, plan_attention, write_kv
from engine.kv_cache import PagedKvCache
from engine.models.config import LlamaConfig
from engine.models.llama_weights import LlamaWeights
from engine.models.rope import rope_tables
from engine.norm import rms_norm
from engine.step import StepInput, StepProgress
from engine.weights import WeightFiles


class LlamaModel:
    """Weights and forward pass; an `engine.models.network.Network`.

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
        loader = LlamaWeights(config, weights, storage, compute)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.final_norm()
        self._head = loader.head(self._embedding)
        loader.check_all_used()
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, max_len, compute)
        # A window that no sequence outgrows hides nothing. Layers with the same window share a plan.
        windows = [None if window is None or window >= max_len else window for window in config.windows]
        self._windows = tuple(dict.fromkeys(windows))
        self._plan_of = tuple(self._windows.index(window) for window in windows)

    def forward(
        self,
        step: StepInput,
        token_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        *,
        cache: PagedKvCache,
        progress: StepProgress,
    ) -> torch.Tensor:
        """One step over T tokens; arguments and result as of `Network.forward`."""
        plans = [plan_attention(step, cache, self.heads, self.compute, window) for window in self._windows]
        positions = torch.from_numpy(step.positions)
        config, heads = self.config, self.heads
        q_width = heads.num_heads * heads.head_dim
        qk_heads = heads.num_heads + heads.num_kv_heads
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = F.embedding(token_ids, self._embedding).to(self.compute)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(hidden, layer.input_norm))
            qk = qkv[:, : qk_heads * heads.head_dim].view(-1, qk_heads, heads.head_dim)
            if layer.qk_norm is not None:
                torch.mul(F.rms_norm(qk, (heads.head_dim,), None, config.norm_eps), layer.qk_norm, out=qk)
            if config.rope_layers[index]:
                _rotate(qk, cos, sin)
            plan = plans[self._plan_of[index]]
            write_kv(plan, cache, index, qkv[:, q_width:])
            progress.layers_done = index + 1
            if index + 1 == config.num_layers and len(logit_rows) == 0:
                break  # nobody reads on: the step was to fill the cache
            mixed = attend(plan, cache, index, qkv[:, :q_width], heads)
            if index + 1 == config.num_layers:
                mixed, hidden = mixed[logit_rows], hidden[logit_rows]
            hidden = layer.out.add_to(hidden, mixed)
            hidden = layer.mlp.add_to(hidden, self._normed(hidden, layer.mlp_norm))
        if len(logit_rows) == 0:
            return torch.empty(0, config.vocab_size)
        logits: torch.Tensor = self._head(self._normed(hidden, self._norm)).float()
        return logits

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight, self.config.norm_eps)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `heads` [T, heads, head_dim] in place; `cos` and `sin` as `rope_tables` makes them, [T, 1, head_dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    heads.mul_(cos).addcmul_(swapped, sin)
