"""Drives a model runner by hand: no scheduler, blocks handed out in a shuffled order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.runner import CpuModelRunner
from engine.step import StepInput
from pdcore.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class ManualSequence:
    """A sequence with its known tokens, how many are computed, and its blocks."""

    tokens: list[int]
    params: SamplingParams = GREEDY
    slot: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What one step computes of a sequence. `from_slot`: its last token is taken from the sequence's sample slot."""

    sequence: ManualSequence
    count: int
    sample: bool = True
    from_slot: bool = False


class ManualDriver:
    """Builds `StepInput`s and runs them; keeps the sequences' bookkeeping."""

    def __init__(self, runner: CpuModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.geometry.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._step_id = 0

    def build(self, parts: Sequence[Part]) -> StepInput:
        """The step input for `parts`, whose single-token parts must come first."""
        size = self.runner.geometry.block_size
        self._step_id += 1
        rows: dict[str, list[int]] = {
            name: [] for name in ("ids", "slots", "positions", "mapping", "starts", "context")
        }
        rows["starts"].append(0)
        sampled, sample_rows = [], []
        for part in parts:
            sequence = part.sequence
            end = sequence.computed + part.count
            while len(sequence.blocks) * size < end:
                sequence.blocks.append(self._free.pop())
            for position in range(sequence.computed, end):
                from_slot = part.from_slot and position == end - 1
                rows["ids"].append(-1 if from_slot else sequence.tokens[position])
                rows["slots"].append(sequence.slot if from_slot else -1)
                rows["positions"].append(position)
                rows["mapping"].append(sequence.blocks[position // size] * size + position % size)
            rows["starts"].append(rows["starts"][-1] + part.count)
            rows["context"].append(end)
            if part.sample:
                sampled.append((sequence, end))
                sample_rows.append(rows["starts"][-1] - 1)
        width = max(len(part.sequence.blocks) for part in parts)
        tables = [part.sequence.blocks + [0] * (width - len(part.sequence.blocks)) for part in parts]
        params = [sequence.params for sequence, _ in sampled]
        return StepInput(
            step_id=self._step_id,
            num_decodes=next((i for i, part in enumerate(parts) if part.count > 1), len(parts)),
            token_ids=np.array(rows["ids"], np.int64),
            token_slots=np.array(rows["slots"], np.int32),
            positions=np.array(rows["positions"], np.int64),
            slot_mapping=np.array(rows["mapping"], np.int64),
            query_start=np.array(rows["starts"], np.int32),
            context_lens=np.array(rows["context"], np.int32),
            block_tables=np.array(tables, np.int32),
            sample_rows=np.array(sample_rows, np.int32),
            sample_slots=np.array([sequence.slot for sequence, _ in sampled], np.int32),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            seeds=np.array([p.seed for p in params], np.uint64),
            sample_index=np.zeros(len(params), np.int32),
            sample_positions=np.array([end for _, end in sampled], np.int64),
            forbidden_rows=np.zeros(0, np.int32),
            forbidden_tokens=np.zeros(0, np.int32),
        )

    def logits(self, parts: Sequence[Part]) -> torch.Tensor:
        """Run `parts` without sampling; logits of the sampled parts."""
        result = self.runner.logits(self.build(parts))
        for part in parts:
            part.sequence.computed += part.count
        return result

    def run(self, parts: Sequence[Part]) -> list[int]:
        """Run `parts`; a sampled token is appended to its sequence. Returns them in order."""
        tokens = self.runner.run(self.build(parts)).token_ids.tolist()
        for part in parts:
            part.sequence.computed += part.count
        for part, token in zip((part for part in parts if part.sample), tokens, strict=True):
            part.sequence.tokens.append(token)
        return tokens

    def generate(self, prompts: Sequence[Sequence[int]], steps: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Greedy decoding of all prompts together, prompts in chunks; the new tokens of each."""
        sequences = [ManualSequence(list(prompt), slot=slot) for slot, prompt in enumerate(prompts)]
        while any(len(s.tokens) < len(p) + steps for s, p in zip(sequences, prompts, strict=True)):
            parts = []
            for sequence, prompt in zip(sequences, prompts, strict=True):
                if len(sequence.tokens) < len(prompt) + steps:
                    left = len(sequence.tokens) - sequence.computed
                    parts.append(Part(sequence, min(left, chunk), sample=left <= chunk))
            self.run(sorted(parts, key=lambda part: part.count > 1))
        self.release(sequences)
        return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]

    def release(self, sequences: Sequence[ManualSequence]) -> None:
        """Give the blocks of `sequences` back."""
        for sequence in sequences:
            self._free.extend(sequence.blocks)
            sequence.blocks = []
