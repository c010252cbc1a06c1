"""Logits against logits: how far two distributions of the next token are apart, and what that does to choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_RESAMPLES = 10_000
_SEED = 20_240_607


def mean_kl(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over the rows of KL(expected || found) in nats; both are logits [rows, vocab]. Equal logits give 0."""
    if torch.equal(expected, found):
        return 0.0
    log_p = torch.log_softmax(expected.double(), -1)
    log_q = torch.log_softmax(found.double(), -1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@dataclass(frozen=True, slots=True)
class PromptScore:
    """One prompt's continuation under two sets of KV.

    Attributes:
        kl: mean over its tokens, in nats.
        top1: share of tokens whose likeliest prediction is right, minus the same under the reference.
        exact_match: share of tokens whose likeliest prediction is the reference's.
    """

    kl: float
    top1: float
    exact_match: float


def score_prompt(expected: torch.Tensor, found: torch.Tensor, following: NDArray[np.int64]) -> PromptScore:
    """Compare logits [rows, vocab]; `following`: int64 [rows], the tokens that come after each row in the text."""
    reference, choice = expected.argmax(-1).numpy(), found.argmax(-1).numpy()
    return PromptScore(
        kl=mean_kl(expected, found),
        top1=float((choice == following).mean() - (reference == following).mean()),
        exact_match=float((choice == reference).mean()),
    )


def bootstrap_interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """95% interval of the mean of paired differences, one per prompt, by resampling prompts. Deterministic."""
    draw = np.random.default_rng(_SEED)
    picks = draw.integers(0, len(differences), (_RESAMPLES, len(differences)))
    low, high = np.percentile(differences[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
