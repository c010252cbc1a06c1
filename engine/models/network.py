"""What the CPU runner asks of a model's implementation."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from engine.kv_cache import PagedKvCache
from engine.step import StepInput, StepProgress


class KvShape(NamedTuple):
    """What K and V of a model are like, the same in all of its layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Network(Protocol):
    """Weights and forward pass of a causal language model whose K and V live in a `PagedKvCache`.

    One thread uses it.
    """

    def forward(
        self,
        step: StepInput,
        token_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        *,
        cache: PagedKvCache,
        progress: StepProgress,
    ) -> torch.Tensor:
        """One step over T tokens of any number of sequences, laid end to end.

        Args:
            step: where the tokens belong, and where their K and V go.
            token_ids: int64 [T]; stands in for the step's own, some of which the runner knows only now.
            logit_rows: int64 [R]; the token rows of which logits are wanted.
            progress: its `layers_done` is raised as each layer's K and V are in `cache`.

        Returns:
            Logits of those rows: float32 [R, vocab_size].
        """
        ...
