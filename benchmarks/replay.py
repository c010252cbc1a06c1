"""A model runner that computes nothing: it fills the cache with recorded KV at a given rate.

For measurements of the transfer: what is sent is real KV, and when it becomes ready is what a model of that speed
would make of it. Tokens that it "samples" mean nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.kv_cache import PagedKvCache
from engine.step import StepInput, StepOutput, StepProgress
from pdcore.types import KvGeometry, ModelInfo


class ReplayRunner:
    """`ModelRunner` over recorded KV.

    Args:
        kv: bfloat16 [layers, 2, tokens, heads, dim]; longer sequences repeat it.
        prefill_tokens_s: tokens per second of steps with prompts. decode_step_s: seconds of a step without.
        digest: of the model that it stands for.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        num_blocks: int,
        prefill_tokens_s: float,
        decode_step_s: float,
        digest: str = "replay",
    ) -> None:
        layers, _, tokens, heads, dim = kv.shape
        self.model = ModelInfo("replay", digest, 1 << 20, 1 << 16, "bfloat16")
        self.geometry = KvGeometry(digest, layers, heads, dim, "bfloat16", 16, num_blocks)
        self.progress = StepProgress()
        self.cache = PagedKvCache(self.geometry)
        self._kv = kv
        self._tokens = tokens
        self._prefill_tokens_s = prefill_tokens_s
        self._decode_step_s = decode_step_s

    def run(self, step: StepInput) -> StepOutput:
        """As `ModelRunner.run`: layer by layer, each done when its share of the step's time is over."""
        started = time.perf_counter()
        self.progress.layers_done = 0
        self.progress.step_id = step.step_id
        prompts = range(step.num_decodes, len(step.context_lens))
        computed = sum(int(step.query_start[s + 1] - step.query_start[s]) for s in prompts)
        seconds = computed / self._prefill_tokens_s if computed else self._decode_step_s
        for layer in range(self.geometry.num_layers):
            for s in prompts:
                self._fill(step, s, layer)
            _sleep_until(started + seconds * (layer + 1) / self.geometry.num_layers)
            self.progress.layers_done = layer + 1
        return StepOutput(np.ones(len(step.sample_rows), np.int64))

    def _fill(self, step: StepInput, s: int, layer: int) -> None:
        end = int(step.context_lens[s])
        start = end - int(step.query_start[s + 1] - step.query_start[s])
        rows = torch.arange(start, end) % self._tokens
        self.cache.scatter(layer, step.block_tables[s].tolist(), start, self._kv[layer][None][:, :, rows])


def _sleep_until(moment: float) -> None:
    """Sleep, as a worker does whose device computes. It oversleeps a little; the moments do not drift with it."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def record(model: str, text: str, tokens: int, path: Path) -> torch.Tensor:
    """KV of the first `tokens` tokens of `text` by `model`, bfloat16; kept in `path`, and read from it if there."""
    if path.exists():
        return load_file(path)["kv"]
    from transformers import AutoTokenizer

    from engine.engine import Engine
    from engine.loader import load_runner
    from engine.model_store import resolve_model
    from engine.sequence import SequenceKind
    from pdcore.config import EngineConfig, SchedulerConfig
    from pdcore.types import RequestKey, RequestSpec, SamplingParams

    folder = resolve_model(model).path
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:tokens]
    assert len(ids) == tokens, f"the text has {len(ids)} tokens only"
    config = EngineConfig(
        model_path=str(folder),
        served_name="recorded",
        dtype="bfloat16",
        num_blocks=tokens // 16 + 2,
        scheduler=SchedulerConfig(max_num_batched_tokens=512, prefill_chunk_tokens=512),
    )
    runner = load_runner(config)
    engine = Engine(runner, config)
    key = RequestKey("record", 0)
    engine.add(RequestSpec(key, tuple(ids), SamplingParams(max_tokens=1, temperature=0.0)), SequenceKind.PREFILL)
    while (plan := engine.schedule()) is not None:
        engine.apply(plan, engine.execute(plan))
    blocks = engine.block_table(key)
    assert blocks is not None
    kv = runner.cache.gather(0, runner.geometry.num_layers, blocks, 0, tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"kv": kv.contiguous()}, path)
    return kv
