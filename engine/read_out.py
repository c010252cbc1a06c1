"""From a step's logits to its output: sampled tokens, and log-probabilities where they are wanted."""

from __future__ import annotations

import numpy as np
import torch

from engine.sampler import sample
from engine.step import RowLogprobs, StepInput, StepOutput

_ROWS_AT_ONCE = 128
"""Rows whose log-probabilities are computed together: what that takes beside the logits stays small."""


def read_out(logits: torch.Tensor, step: StepInput) -> StepOutput:
    """Sample, and score.

    Args:
        logits: float32 [R + Q, V], of ``step.logit_rows``; not changed.
    """
    samples = len(step.sample_rows)
    tokens = sample(logits[:samples], step)
    logprobs = scores = None
    if step.logprobs is not None:
        wanted = torch.from_numpy(np.flatnonzero(step.logprobs >= 0))
        # A row that has no token is an error, whatever its log-probability.
        logprobs = row_logprobs(logits[wanted], tokens[wanted].clamp(min=0), int(step.logprobs.max()))
    if step.scores is not None:
        scores = row_logprobs(logits[samples:], torch.from_numpy(step.scores.targets), step.scores.top)
    return StepOutput(tokens.numpy(), logprobs, scores)


def row_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> RowLogprobs:
    """Log-softmax of each row, at its token and at its `top` largest.

    Args:
        logits: float32 [N, V]. tokens: int64 [N].
    """
    top = min(top, logits.shape[1])
    values = torch.empty(len(logits))
    top_values, top_ids = torch.empty(len(logits), top), torch.empty((len(logits), top), dtype=torch.int64)
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        logprobs = torch.log_softmax(logits[part], -1)
        values[part] = logprobs.gather(1, tokens[part].unsqueeze(1)).squeeze(1)
        if top:
            top_values[part], top_ids[part] = torch.topk(logprobs, top)
    return RowLogprobs(values.numpy(), top_ids.int().numpy(), top_values.numpy())
