"""One sequence through a model's own runner: KV out, KV in, logits of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.loader import model_digest
from engine.models.config import read_config
from engine.models.llama import LlamaModel
from engine.runner import CpuModelRunner
from engine.step import StepInput
from engine.weights import WeightFiles
from pdcore.types import KvGeometry, ModelInfo

BLOCK_SIZE = 16


def model_geometry(folder: Path, dtype: str, num_blocks: int = 1) -> KvGeometry:
    """What the KV of a model is like when it is served in `dtype`. Raises `ModelError`."""
    architecture = read_config(folder)
    return KvGeometry(
        model_digest=model_digest(architecture, WeightFiles(folder)),
        num_layers=architecture.num_layers,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )


def make_runner(folder: Path, storage: str, compute: str, max_tokens: int) -> CpuModelRunner:
    """A runner of the model in `folder` whose arithmetic has a dtype of the caller's choice.

    `engine.loader.load_runner` takes the dtype that is fast on this CPU; here it is what is compared.

    Args:
        storage: dtype that the weights are rounded to, as when the model is served. compute: dtype of the
            arithmetic and of the cache.
        max_tokens: tokens of a sequence at most; the cache holds one.

    Raises:
        ModelError: the model cannot be read, or is not of a supported kind.
    """
    architecture = read_config(folder)
    weights = WeightFiles(folder)
    with torch.inference_mode():
        network = LlamaModel(architecture, weights, getattr(torch, storage), getattr(torch, compute), max_tokens)
    geometry = replace(model_geometry(folder, storage, num_blocks=-(-max_tokens // BLOCK_SIZE)), dtype=compute)
    model = ModelInfo(folder.name, geometry.model_digest, max_tokens, architecture.vocab_size, storage)
    return CpuModelRunner(network, model, geometry, max_num_seqs=1)


class SequenceRun:
    """The one sequence of a runner's cache: its tokens are computed, read out and written from position 0 on."""

    def __init__(self, runner: CpuModelRunner) -> None:
        self.runner = runner
        self._blocks = list(range(runner.geometry.num_blocks))
        self._steps = 0

    def compute(self, tokens: Sequence[int], start: int) -> None:
        """Put K and V of `tokens`, the first at position `start`, into the cache; all before it are there."""
        self.runner.logits(self._step(tokens, start, score=False))

    def score(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """`compute`, and the logits after each of the tokens: float32 [tokens, vocab_size]."""
        return self.runner.logits(self._step(tokens, start, score=True))

    def read_kv(self, count: int) -> torch.Tensor:
        """K and V of the first `count` tokens: [layers, 2, count, heads, dim] in the cache's dtype."""
        return self.runner.cache.gather(0, self.runner.geometry.num_layers, self._blocks, 0, count)

    def write_kv(self, values: torch.Tensor) -> None:
        """Replace K and V of the first tokens; `values` as `read_kv` returns them, of any floating dtype."""
        self.runner.cache.scatter(0, self._blocks, 0, values.to(self.runner.cache.dtype))

    def _step(self, tokens: Sequence[int], start: int, score: bool) -> StepInput:
        count = len(tokens)
        rows = count if score else 0
        positions = np.arange(start, start + count, dtype=np.int64)
        self._steps += 1
        return StepInput(
            step_id=self._steps,
            num_decodes=int(count == 1),
            token_ids=np.array(tokens, np.int64),
            token_slots=np.full(count, -1, np.int32),
            positions=positions,
            slot_mapping=positions,  # the blocks are in order
            query_start=np.array([0, count], np.int32),
            context_lens=np.array([start + count], np.int32),
            block_tables=np.array([self._blocks], np.int32),
            sample_rows=np.arange(rows, dtype=np.int32),
            sample_slots=np.zeros(rows, np.int32),
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            seeds=np.zeros(rows, np.uint64),
            sample_index=np.zeros(rows, np.int32),
            sample_positions=positions[:rows] + 1,
            forbidden_rows=np.zeros(0, np.int32),
            forbidden_tokens=np.zeros(0, np.int32),
        )
