"""The model runner of the CPU backend."""

from __future__ import annotations

import numpy as np
import torch

from engine.kv_cache import PagedKvCache
from engine.models.network import Network
from engine.read_out import read_out
from engine.step import StepInput, StepOutput, StepProgress
from pdcore.types import MAX_SAMPLES, KvGeometry, ModelInfo


class CpuModelRunner:
    """Runs steps on CPU. One thread calls `run`; others may use `progress`, and `gather` and `scatter` of the cache.

    Attributes:
        model, geometry, progress: see `engine.step.ModelRunner`.
        cache: the paged cache, with `gather` and `scatter` in the canonical layout.
    """

    def __init__(self, network: Network, model: ModelInfo, geometry: KvGeometry, max_num_seqs: int) -> None:
        """`max_num_seqs`: of a step; each may have `MAX_SAMPLES` samples."""
        self.model = model
        self.geometry = geometry
        self.progress = StepProgress()
        self.cache = PagedKvCache(geometry)
        self._network = network
        self._last_sampled = np.zeros(max_num_seqs * MAX_SAMPLES, np.int64)

    def run(self, step: StepInput) -> StepOutput:
        """Run one forward pass, write K and V of its tokens, sample. Blocks until the tokens are on the host."""
        self.progress.layers_done = 0  # before the id: a reader must never see this step with the last one's count
        self.progress.step_id = step.step_id
        with torch.inference_mode():
            output = read_out(self._logits(step), step)
        self._last_sampled[step.sample_slots] = output.token_ids
        return output

    def logits(self, step: StepInput) -> torch.Tensor:
        """`run` without the sampling: float32 [R + Q, vocab_size], of `step.logit_rows`."""
        with torch.inference_mode():
            return self._logits(step)

    def _logits(self, step: StepInput) -> torch.Tensor:
        token_ids = np.where(step.token_slots >= 0, self._last_sampled[step.token_slots], step.token_ids)
        return self._network.forward(
            step,
            torch.from_numpy(token_ids),
            torch.from_numpy(step.logit_rows.astype(np.int64)),
            cache=self.cache,
            progress=self.progress,
        )
