"""What parameters and tokens so far do to logits: kept up token by token, against counting and searching anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.token_rules import BadWords, LogitRules, Pairs, Ruled, SequenceRules, TokenCounts, join_rules
from pdcore.types import SamplingParams

TOKENS = st.lists(st.integers(0, 12), max_size=20)
WORDS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6)
EVERYTHING = SamplingParams(
    50,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.25,
    logit_bias=((2, -1.5), (9, 4.0)),
    allowed_token_ids=tuple(range(11)),
    bad_words=((3,), (1, 2), (4, 4, 4)),
)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def pairs(found: Pairs) -> set[tuple[int, int]]:
    assert len(found.rows) == len(found.tokens)
    made = set(zip(found.rows.tolist(), found.tokens.tolist(), strict=True))
    assert len(made) == len(found.rows), "a pair comes twice"
    return made


@given(TOKENS, TOKENS, TOKENS)
def test_counts_equal_counting_everything(prompt: list[int], output: list[int], later: list[int]) -> None:
    counts = TokenCounts(array(prompt), array(output), 60)
    for token in later:
        counts.add(token)
    expected = Counter(output + later)
    found = dict(zip(counts.tokens[: counts.size].tolist(), counts.counts[: counts.size].tolist(), strict=True))
    assert len(found) == counts.size, "a token stands twice"
    assert found == {token: expected[token] for token in {*prompt, *output, *later}}


@given(WORDS, st.lists(st.integers(0, 4), max_size=10))
def test_bad_words_equal_the_naive_search(words: list[list[int]], tokens: list[int]) -> None:
    expected = set()
    for *before, last in words:
        if len(before) <= len(tokens) and tokens[len(tokens) - len(before) :] == before:
            expected.add(last)
    assert set(BadWords(words).completing(array(tokens)).tolist()) == expected


@pytest.mark.parametrize("params", [SamplingParams(1), SamplingParams(9, 0.5, 3, 0.9, 0.1, 7, (3,), 4, logprobs=5)])
def test_parameters_that_leave_logits_alone_make_no_rules(params: SamplingParams) -> None:
    assert SequenceRules.of(params, array([1]), array([]), 10) is None


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS)
def test_kept_up_equals_built_anew(outputs: list[list[int]], prompt: list[int]) -> None:
    """After tokens one by one as after a preemption, a replay or a move, where all are known at once."""
    kept, anew = [], []
    for row, output in enumerate(outputs):
        rules = SequenceRules.of(EVERYTHING, array(prompt), array([]), 60)
        again = SequenceRules.of(EVERYTHING, array(prompt), array(output), 60)
        assert rules is not None
        assert again is not None
        for token in output:
            rules.add(token)
        known = array(prompt + output)
        kept.append(Ruled(row, rules, known))
        anew.append(Ruled(row, again, known))
    left, right = join_rules(kept, len(outputs)), join_rules(anew, len(outputs))
    assert left is not None
    assert right is not None
    for entry in fields(LogitRules):
        a, b = getattr(left, entry.name), getattr(right, entry.name)
        if isinstance(a, Pairs):
            assert pairs(a) == pairs(b), entry.name
        elif entry.name != "seen_counts":
            assert np.array_equal(a, b), entry.name
    seen = [
        dict(zip(zip(r.seen.rows.tolist(), r.seen.tokens.tolist(), strict=True), r.seen_counts.tolist(), strict=True))
        for r in (left, right)
    ]
    assert seen[0] == seen[1]


def test_rows_without_rules_have_none() -> None:
    ruled = SequenceRules.of(EVERYTHING, array([5, 1]), array([7, 7]), 60)
    biased = SequenceRules.of(SamplingParams(5, logit_bias=((8, 1.0),)), array([5]), array([]), 60)
    assert ruled is not None
    assert biased is not None
    rules = join_rules([Ruled(1, ruled, array([5, 1, 7, 7])), Ruled(3, biased, array([5]))], 5)
    assert rules is not None
    assert pairs(rules.biased) == {(1, 2), (1, 9), (3, 8)}
    assert rules.bias.tolist() == [-1.5, 4.0, 1.0]
    assert pairs(rules.seen) == {(1, 5), (1, 1), (1, 7)}
    assert pairs(rules.allowed) == {(1, token) for token in range(11)}
    assert pairs(rules.banned) == {(1, 3)}
    assert rules.repetition.tolist() == [1, 1.25, 1, 1, 1]
    assert rules.presence.tolist() == [0, 0.5, 0, 0, 0]
    assert rules.frequency.tolist() == [0, -0.25, 0, 0, 0]
    assert join_rules([], 3) is None


def test_only_the_repetition_penalty_cares_for_the_prompt() -> None:
    rules = SequenceRules.of(SamplingParams(5, presence_penalty=1.0), array([5, 1]), array([7]), 60)
    assert rules is not None
    joined = join_rules([Ruled(0, rules, array([5, 1, 7]))], 1)
    assert joined is not None
    assert pairs(joined.seen) == {(0, 7)}
