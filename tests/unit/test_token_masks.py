"""Token masks on logits: only the rows that have one change, and those as the bits say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Part, build_step
from engine.sampler import sample
from engine.sequence import Sequence, SequenceKind
from engine.step import NO_TOKEN, StepInput
from engine.token_masks import keep_allowed
from pdcore.types import RequestSpec
from tests.support.engine_kit import request


@dataclass
class Masks:
    mask_rows: np.ndarray
    mask_bits: np.ndarray
    waited: list[int] = field(default_factory=list)

    def await_masks(self) -> None:
        self.waited.append(1)


def masks(rows: list[int], allowed: list[list[int]], words: int) -> Masks:
    bits = np.zeros((len(rows), words), np.uint32)
    for row, tokens in zip(bits, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << (token % 32))
    return Masks(np.array(rows, np.int32), bits)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("spare", [0, 3])
def test_as_the_bits_say(vocab: int, spare: int) -> None:
    """`spare`: words of a tokenizer that knows more tokens than the model."""
    generator = np.random.default_rng(vocab)
    logits = torch.randn(5, vocab)
    allowed = [np.flatnonzero(generator.random(vocab) < 0.3).tolist() for _ in range(3)]
    words = -(-vocab // 32) + spare
    given = masks([4, 0, 2], allowed, words)
    given.mask_bits[:, -1] |= 0 if not spare else 0xFFFFFFFF
    before = logits.clone()
    kept = keep_allowed(logits, given)
    assert torch.equal(logits, before), "the argument is not changed"
    expected = before.clone()
    for row, tokens in zip((4, 0, 2), allowed, strict=True):
        out = [token for token in range(vocab) if token not in tokens]
        expected[row, out] = -torch.inf
    assert torch.equal(kept, expected)
    assert given.waited


def test_without_masks_nothing_is_copied_and_nobody_waits() -> None:
    logits, given = torch.randn(3, 40), masks([], [], 2)
    assert keep_allowed(logits, given) is logits
    assert not given.waited


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_filters_come_after_the_mask(temperature: float, filters: dict[str, Any]) -> None:
    """As if the vocabulary had only the tokens that are allowed; the other rows are as without any mask."""
    torch.manual_seed(0)
    logits = torch.randn(64, 300) * 3
    specs = [request(f"r{row}", 1, temperature=temperature, seed=row, **filters) for row in range(64)]
    plain = sampling_step(specs)
    rows = list(range(0, 64, 2))
    allowed = [sorted({(7 * row + 11 * i) % 300 for i in range(9)}) for row in rows]
    given = masks(rows, allowed, 10)
    limited = replace(plain, mask_rows=given.mask_rows, mask_bits=given.mask_bits, await_masks=given.await_masks)
    tokens, free = sample(logits, limited), sample(logits, plain)
    assert torch.equal(tokens[1::2], free[1::2])
    for row, choices in zip(rows, allowed, strict=True):
        narrow = torch.full((1, 300), -torch.inf)
        narrow[0, choices] = logits[row, choices]
        assert tokens[row] == sample(narrow, sampling_step([specs[row]]))[0]
        assert int(tokens[row]) in choices


def test_where_the_other_rules_exclude_what_is_left_there_is_no_token() -> None:
    specs = [request(f"r{row}", 1, temperature=row, logit_bias=((5, 100.0),)) for row in range(2)]
    given = masks([0, 1], [[5, 7], [5, 7]], 10)
    step = replace(
        sampling_step(specs), mask_rows=given.mask_rows, mask_bits=given.mask_bits, await_masks=given.await_masks
    )
    logits = torch.randn(2, 300)
    assert sample(logits, step).tolist() == [5, 5], "a bias chooses among what the mask leaves"
    forbidden = {"forbidden_rows": np.array([0, 0, 1], np.int32), "forbidden_tokens": np.array([5, 7, 5], np.int32)}
    assert sample(logits, replace(step, **forbidden)).tolist() == [NO_TOKEN, 7]
    biased = [request(f"b{row}", 1, temperature=row, logit_bias=((9, 100.0),)) for row in range(2)]
    limited = replace(sampling_step(biased), mask_rows=given.mask_rows, mask_bits=given.mask_bits)
    assert set(sample(logits, limited).tolist()) <= {5, 7}, "and cannot bring back what it leaves out"


def sampling_step(specs: list[RequestSpec]) -> StepInput:
    """A step that samples one token of each."""
    sequences = [Sequence(spec, SequenceKind.GENERATE, block_size=16, now=0.0) for spec in specs]
    for sequence in sequences:
        sequence.take_blocks([0])
    return build_step(1, [Part(sequence, 1) for sequence in sequences], 16)
