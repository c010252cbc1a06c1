"""An independent reference for greedy decoding: `transformers`, teacher-forced.

A greedy output is right exactly if each of its tokens is the argmax given the prompt and the tokens before it, and
one forward pass over prompt + output checks them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Divergence:
    """A position of the output where the reference would have chosen otherwise; `margin` between the two logits."""

    position: int
    margin: float


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    model.eval()
    return model


def divergences(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> list[Divergence]:
    """Where a greedy `output` differs from the reference's choice. Design decision 7 allows margins below 1e-3."""
    tokens = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = model(tokens, logits_to_keep=len(output) + 1).logits[0, :-1].float()
    best = logits.max(dim=-1)
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return [
        Divergence(i, float(best.values[i] - chosen[i]))
        for i in range(len(output))
        if int(best.indices[i]) != output[i] and float(best.values[i] - chosen[i]) > 0
    ]
