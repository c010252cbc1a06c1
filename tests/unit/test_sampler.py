"""Sampling: the distribution, the filters against transformers, and independence of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import sampler
from engine.sampler import sample
from engine.token_rules import LogitRules


@dataclass(frozen=True)
class Fields:
    """The sampling fields of a step, all rows alike unless given as arrays."""

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    seeds: np.ndarray
    sample_index: np.ndarray
    sample_positions: np.ndarray
    forbidden_rows: np.ndarray
    forbidden_tokens: np.ndarray
    rules: LogitRules | None = None

    mask_rows = np.zeros(0, np.int32)  # masks have tests of their own
    mask_bits = np.zeros((0, 0), np.uint32)

    def await_masks(self) -> None:
        raise AssertionError("there are none")

    def rows(self, chosen: list[int]) -> Fields:
        per_row = {
            name: getattr(self, name)[chosen]
            for name in self.__dataclass_fields__
            if not name.startswith("forbidden") and name != "rules"
        }
        return replace(self, **per_row)


def fields(rows: int, **values: object) -> Fields:
    defaults = {
        "temperature": (1.0, np.float32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "top_k": (0, np.int32),
        "seeds": (0, np.uint64),
        "sample_index": (0, np.int32),
        "sample_positions": (0, np.int64),
    }
    made = {
        name: np.broadcast_to(np.asarray(values.pop(name, default), kind), rows).copy()
        for name, (default, kind) in defaults.items()
    }
    pairs = np.array(values.pop("forbidden", []), np.int32).reshape(-1, 2)
    assert not values
    return Fields(**made, forbidden_rows=pairs[:, 0], forbidden_tokens=pairs[:, 1])


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Normalised statistic: about standard normal if `tokens` are drawn from `probabilities`."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    common = expected >= 5
    pooled_expected = torch.cat((expected[common], expected[~common].sum()[None]))
    pooled_counts = torch.cat((counts[common], counts[~common].sum()[None]))
    real = pooled_expected > 0
    statistic = ((pooled_counts - pooled_expected)[real] ** 2 / pooled_expected[real]).sum()
    freedom = int(real.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vary", ["seeds", "sample_index", "sample_positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_distribution_is_the_softmax(vary: str, temperature: float) -> None:
    logits = random_logits(1, 300)
    draws = 40_000
    tokens = sample(logits.expand(draws, -1), fields(draws, temperature=temperature, **{vary: np.arange(draws)}))
    assert abs(chi_square(tokens, torch.softmax(logits[0] / temperature, 0))) < 4


def test_consecutive_positions_are_independent() -> None:
    """Pairs (token at position n, token at n + 1) under one seed spread over the product distribution."""
    logits = random_logits(1, 8, scale=1.0)
    draws = 60_000
    tokens = sample(logits.expand(draws, -1), fields(draws, seeds=7, sample_positions=np.arange(draws)))
    p = torch.softmax(logits[0], 0)
    pairs = tokens[0::2] * 8 + tokens[1::2]
    assert abs(chi_square(pairs, torch.outer(p, p).reshape(-1))) < 4


def test_noise_has_a_uniform_beneath_it() -> None:
    keys = sampler._row_keys(np.arange(64, dtype=np.uint64), np.zeros(64, np.int32), np.zeros(64, np.int64))
    noise = sampler._gumbel(keys, torch.arange(49152).unsqueeze(0))
    uniform = torch.exp(-torch.exp(-noise.double()))
    assert torch.isfinite(noise).all()
    counts = torch.histc(uniform.float(), bins=1000, min=0, max=1).double()
    expected = noise.numel() / 1000
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(float(statistic - 999) / (2 * 999) ** 0.5) < 4
    # Neighbouring tokens, and neighbouring seeds, are uncorrelated.
    centred = uniform - 0.5
    for left, right in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        correlation = (left * right).mean() * 12 * left.numel() ** 0.5
        assert abs(float(correlation)) < 4


@pytest.mark.parametrize("vocab", [40, 2000])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 700},
        {"top_k": 5000},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"top_p": 0.99999},
        {"min_p": 0.1},
        {"min_p": 0.9},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.2, "temperature": 0.6},
        {"top_p": 0.9, "min_p": 0.01, "temperature": 2.5},
    ],
)
def test_filters_keep_what_those_of_transformers_keep(vocab: int, params: dict[str, float]) -> None:
    logits = random_logits(1, vocab, seed=vocab)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.get("temperature", 1.0))])
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone()), -1)[0]
    draws = 3000
    tokens = sample(logits.expand(draws, -1), fields(draws, seeds=np.arange(draws), **params))
    assert (expected[tokens] > 0).all()
    assert abs(chi_square(tokens, expected)) < 4.5 if (expected > 0).sum() > 1 else True
    likely = expected * draws > 20
    assert set(torch.nonzero(likely).flatten().tolist()) <= set(tokens.tolist())


def test_a_row_depends_on_nothing_else() -> None:
    """Every kind of row alone, in the batch, and in a shuffled batch: the same token."""
    vocab = 1500
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 30},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.999},  # needs more than the candidates
        {"temperature": 1.0, "top_k": 900},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1e-30, "top_k": 5},
    ]
    repeated = kinds * 8
    count = len(repeated)
    columns = {
        name: [kind.get(name, default) for kind in repeated]
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    batch = fields(count, seeds=np.arange(count) * 2**57, sample_positions=np.arange(count), **columns)
    logits = random_logits(count, vocab)
    together = sample(logits, batch)
    for row in range(count):
        assert sample(logits[[row]], batch.rows([row])) == together[row]
    order = np.random.default_rng(0).permutation(count).tolist()
    assert torch.equal(sample(logits[order], batch.rows(order)), together[order])
    half = order[: count // 2]
    assert torch.equal(sample(logits[half], batch.rows(half)), together[half])


def test_threads_do_not_change_the_tokens() -> None:
    logits = random_logits(1, 60_000)
    batch = fields(1, top_p=0.95, temperature=1.5, seeds=3)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([int(sample(logits, replace(batch, sample_positions=np.array([n])))) for n in range(5)])
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_seed_index_and_position_each_matter() -> None:
    logits = torch.zeros(1, 1000)
    base = int(sample(logits, fields(1)))
    for name, values in (("seeds", [1, 2**63, 2**32]), ("sample_index", [1, 2]), ("sample_positions", [1, 2**40])):
        for value in values:
            assert int(sample(logits, fields(1, **{name: value}))) != base


def test_greedy_takes_the_largest_and_leaves_the_logits_alone() -> None:
    logits = random_logits(5, 100)
    before = logits.clone()
    allowed = fields(5, temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)
    assert torch.equal(sample(logits, allowed), logits.argmax(-1))
    best, second = logits[2].topk(2).indices.tolist()
    tokens = sample(logits, fields(5, temperature=0.0, forbidden=[(2, best)]))
    assert tokens[2] == second
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_forbidden_tokens_are_never_sampled(params: dict[str, float]) -> None:
    logits = torch.tensor([[9.0, 8.5, 1.0, 0.5]]).expand(500, -1)
    pairs = [(row, token) for row in range(500) for token in (0, 1)]
    tokens = sample(logits, fields(500, seeds=np.arange(500), forbidden=pairs, **params))
    assert set(tokens.tolist()) == {2, 3}


def test_ties_at_the_last_place_are_kept() -> None:
    logits = torch.zeros(2000, 1000)
    logits[:, 0] = 1.0
    tokens = sample(logits, fields(2000, seeds=np.arange(2000), top_k=2))
    assert len(set(tokens.tolist())) > 500


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), fields(0)).shape == (0,)
