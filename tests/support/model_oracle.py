"""A runner under test beside the same model in `transformers`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.loader import load_runner
from engine.runner import CpuModelRunner
from pdcore.config import EngineConfig, SchedulerConfig
from tests.support.steps import ManualDriver, ManualSequence, Part


def runner_for(
    path: Path, dtype: str = "float32", block_size: int = 16, num_blocks: int = 256, model_impl: str = "auto"
) -> CpuModelRunner:
    return load_runner(
        EngineConfig(
            str(path),
            "tiny",
            dtype=dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            scheduler=SchedulerConfig(max_num_seqs=64),
            model_impl=model_impl,
        )
    )


class Oracle:
    """Logits of transformers, per prompt: [tokens, vocab]; by the model's plainest attention."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0]


def tokens_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


def random_walk(driver: ManualDriver, oracle: Oracle, seed: int, max_seqs: int = 10, max_len: int = 90) -> None:
    """Sequences of random lengths go through random chunks in random mixtures; every sampled row is compared."""
    rng = random.Random(seed)
    sequences = [ManualSequence(tokens_of(rng.randint(1, max_len), rng.random())) for _ in range(max_seqs)]
    expected = [oracle(sequence.tokens) for sequence in sequences]
    while pending := [s for s in sequences if s.computed < len(s.tokens)]:
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        parts = []
        for sequence in chosen:
            left = len(sequence.tokens) - sequence.computed
            count = rng.choice([1, left, rng.randint(1, left)])
            parts.append(Part(sequence, count, sample=rng.random() < 0.8))
        parts.sort(key=lambda part: part.count > 1)
        logits = driver.logits(parts)
        sampled = [part.sequence for part in parts if part.sample]
        assert logits.shape == (len(sampled), 512)
        for row, sequence in zip(logits, sampled, strict=True):
            reference = expected[sequences.index(sequence)][sequence.computed - 1]
            assert torch.allclose(row, reference, atol=1e-4, rtol=0)
    driver.release(sequences)


def greedy_equals(driver: ManualDriver, oracle: Oracle, lengths: Sequence[int] = (1, 16, 45), steps: int = 8) -> None:
    """Greedy decoding of prompts of these lengths, together, in chunks and alone, against the oracle's choices."""
    prompts = [tokens_of(length, length) for length in lengths]
    together = driver.generate(prompts, steps)
    chunked = driver.generate(prompts, steps, chunk=13)
    for prompt, tokens, in_chunks in zip(prompts, together, chunked, strict=True):
        forced = oracle(prompt + tokens)[len(prompt) - 1 : -1]
        top = forced.topk(2).values
        assert (top[:, 0] - top[:, 1]).min() > 1e-3, "a near-tie: choose another prompt"
        assert tokens == forced.argmax(-1).tolist()
        assert tokens == in_chunks == driver.generate([prompt], steps)[0]
