"""Bias, penalties and exclusions: against transformers' processors, and independence of the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.read_out import row_logprobs
from engine.sampler import sample
from engine.shaping import shape
from engine.step import NO_TOKEN
from engine.token_rules import Ruled, SequenceRules, join_rules
from pdcore.types import SamplingParams
from tests.unit.test_sampler import Fields, fields, random_logits

VOCAB = 300


def fields_of(params: list[SamplingParams], prompts: list[list[int]], outputs: list[list[int]]) -> Fields:
    """Sampling fields of a step that has these sequences' next tokens to sample."""
    ruled = []
    for row, (p, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
        known = np.array(prompt + output, np.int64)
        rules = SequenceRules.of(p, known[: len(prompt)], known[len(prompt) :], len(known) + 1)
        if rules is not None:
            ruled.append(Ruled(row, rules, known))
    made = fields(
        len(params),
        temperature=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seeds=[p.seed for p in params],
        sample_positions=[len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)],
    )
    return replace(made, rules=join_rules(ruled, len(params)))


def shaped(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[V]: the logits of one row as they are sampled."""
    result = shape(logits.unsqueeze(0), fields_of([params], [prompt], [output]))
    assert result is not None
    return result.logits[0]


def tokens(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, output = random_logits(1, VOCAB)[0], tokens(1, 40), tokens(2, 30)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + output]), logits.unsqueeze(0).clone())[0]
    assert torch.equal(shaped(logits, SamplingParams(9, repetition_penalty=penalty), prompt, output), expected)


def test_bad_words_are_those_of_transformers() -> None:
    words = [[7], [3, 4], [4, 3, 4], [9, 9, 9, 9], [2] * 60]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=None)
    for seed in range(30):
        logits = random_logits(1, 10, seed)[0]
        # Words that begin in the prompt and end in the output, too.
        prompt, output = tokens(seed, 3, 10), [3, 4, 4, 3, 9, 9, 9][: seed % 8]
        expected = processor(torch.tensor([prompt + output]), logits.unsqueeze(0).clone())[0]
        params = SamplingParams(9, bad_words=tuple(map(tuple, words)))
        assert torch.equal(shaped(logits, params, prompt, output), expected)


def test_logit_bias_is_the_sequence_bias_of_transformers() -> None:
    logits = random_logits(1, VOCAB)[0]
    bias = {3: 2.5, 200: -7.0, 17: 100.0}
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    expected = processor(torch.tensor([[1, 2]]), logits.unsqueeze(0).clone())[0]
    assert torch.equal(shaped(logits, SamplingParams(9, logit_bias=tuple(bias.items())), [1], [2]), expected)


def test_all_of_transformers_at_once_in_its_order() -> None:
    """`generate` applies bias, then the repetition penalty, then excludes bad words."""
    logits, prompt, output = random_logits(1, VOCAB)[0], tokens(3, 50), tokens(4, 20)
    chain = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(prompt[0],): 3.0, (5,): -2.0}),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoBadWordsLogitsProcessor([[11], [output[-1], 12]], eos_token_id=None),
        ]
    )
    expected = chain(torch.tensor([prompt + output]), logits.unsqueeze(0).clone())[0]
    params = SamplingParams(
        9,
        repetition_penalty=1.4,
        logit_bias=tuple(sorted({prompt[0]: 3.0, 5: -2.0}.items())),
        bad_words=((11,), (output[-1], 12)),
    )
    assert torch.equal(shaped(logits, params, prompt, output), expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.3), (-1.5, 0.25), (2.0, -2.0)])
def test_presence_and_frequency_count_the_output_only(presence: float, frequency: float) -> None:
    """As the OpenAI reference states it: ``logit - count * frequency - (count > 0) * presence``."""
    logits, prompt, output = random_logits(1, VOCAB)[0], tokens(5, 40), tokens(6, 60, 20)
    expected = logits.clone()
    for token, count in Counter(output).items():
        expected[token] -= count * frequency + presence
    params = SamplingParams(9, presence_penalty=presence, frequency_penalty=frequency)
    assert torch.allclose(shaped(logits, params, prompt, output), expected, atol=1e-5, rtol=0)


def test_only_allowed_tokens_are_left() -> None:
    logits = random_logits(1, VOCAB)[0]
    result = shaped(logits, SamplingParams(9, allowed_token_ids=(5, 9, 250)), [1], [])
    assert torch.nonzero(result > -torch.inf).flatten().tolist() == [5, 9, 250]
    assert torch.equal(result[[5, 9, 250]], logits[[5, 9, 250]])


KINDS = [
    SamplingParams(9, 0.0),
    SamplingParams(9, 0.0, repetition_penalty=2.0),
    SamplingParams(9, 1.0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(9, 0.8, 40, logit_bias=((4, 5.0), (7, -5.0)), bad_words=((1,), (2, 3))),
    SamplingParams(9, 1.3, top_p=0.9, allowed_token_ids=tuple(range(0, 1000, 3))),
    SamplingParams(9, 1.0, 700, 0.7, allowed_token_ids=(3, 8, 9, 12)),  # fewer than the filters' candidates
    SamplingParams(9, 1.0, min_p=0.05, repetition_penalty=0.8),
]


def test_a_row_depends_on_nothing_else() -> None:
    count, vocab = 5 * len(KINDS), 1500
    params = [replace(kind, seed=i) for i, kind in enumerate(KINDS * 5)]
    prompts = [tokens(i, 5 + i, vocab) for i in range(count)]
    outputs = [tokens(100 + i, i % 9, 12) for i in range(count)]
    logits = random_logits(count, vocab)

    def choose(rows: list[int]) -> list[int]:
        chosen = fields_of([params[r] for r in rows], [prompts[r] for r in rows], [outputs[r] for r in rows])
        return sample(logits[rows], chosen).tolist()

    together = choose(list(range(count)))
    assert [choose([row])[0] for row in range(count)] == together
    order = np.random.default_rng(0).permutation(count).tolist()
    assert choose(order) == [together[row] for row in order]


def test_few_allowed_tokens_are_filtered_as_their_own_distribution() -> None:
    """Fewer tokens than the filters look at first: top-p applies among them all the same."""
    logits = torch.zeros(1, 2000)
    logits[0, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    params = [SamplingParams(9, 1.0, 700, 0.9, seed=seed, allowed_token_ids=(0, 1, 2, 3)) for seed in range(300)]
    chosen = sample(logits.expand(300, -1), fields_of(params, [[1]] * 300, [[]] * 300))
    assert set(chosen.tolist()) == {0, 1, 2}  # 0.64, 0.24, 0.09, 0.03


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_excluded_yields_none(temperature: float) -> None:
    stuck = SamplingParams(9, temperature, top_k=5, allowed_token_ids=(3, 4), bad_words=((3,), (1, 4)))
    free = SamplingParams(9, temperature, top_k=5, allowed_token_ids=(3, 4), bad_words=((3,), (2, 4)))
    chosen = sample(random_logits(2, VOCAB), fields_of([stuck, free], [[1], [1]], [[], []]))
    assert chosen.tolist() == [NO_TOKEN, 4]


def test_logits_are_left_alone() -> None:
    logits = random_logits(len(KINDS), 1500)
    before = logits.clone()
    sample(logits, fields_of(KINDS, [[1, 2, 3]] * len(KINDS), [[4, 4]] * len(KINDS)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("rows", "top"), [(1, 0), (5, 3), (300, 20), (2, 500)])
def test_log_probabilities_are_those_of_the_model(rows: int, top: int) -> None:
    logits = random_logits(rows, VOCAB)
    chosen = torch.arange(rows) % VOCAB
    found = row_logprobs(logits, chosen, top)
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(torch.from_numpy(found.values).double(), expected[torch.arange(rows), chosen], atol=1e-5)
    best, ids = expected.topk(min(top, VOCAB))
    assert torch.equal(torch.from_numpy(found.top_ids).long(), ids)
    assert torch.allclose(torch.from_numpy(found.top_values).double(), best, atol=1e-5)


def test_log_probabilities_do_not_depend_on_the_batch() -> None:
    logits = random_logits(200, VOCAB)
    together = row_logprobs(logits, torch.zeros(200, dtype=torch.int64), 5)
    for row in (0, 77, 199):
        alone = row_logprobs(logits[[row]], torch.zeros(1, dtype=torch.int64), 5)
        assert alone.values[0] == together.values[row]
        assert (alone.top_ids[0] == together.top_ids[row]).all()
        assert (alone.top_values[0] == together.top_values[row]).all()


SMALL = 12
IDS = st.integers(0, SMALL - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-4.0, 0.5, 8.0]), max_size=3).map(lambda d: tuple(d.items())),
    allowed_token_ids=st.lists(IDS, max_size=5, unique=True).map(tuple),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


def naive(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Token by token, as docs/sampling.md says it. The numbers drawn above make every step exact."""
    known, changed = prompt + output, []
    for token, logit in enumerate(logits.tolist()):
        value = logit + dict(params.logit_bias).get(token, 0.0)
        if token in known:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        excluded = bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        for *before, last in params.bad_words:
            fits = len(before) <= len(known) and known[len(known) - len(before) :] == before
            excluded = excluded or (last == token and fits)
        changed.append(-np.inf if excluded else value)
    return np.array(changed, np.float32)


@given(
    st.lists(
        st.tuples(PARAMS, st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, max_size=6)), min_size=1, max_size=4
    )
)
@settings(deadline=None)
def test_a_batch_equals_going_token_by_token(rows: list[tuple[SamplingParams, list[int], list[int]]]) -> None:
    logits = torch.arange(-SMALL * len(rows), SMALL * len(rows), 2).view(len(rows), SMALL).float() / 4
    params, prompts, outputs = (list(column) for column in zip(*rows, strict=True))
    result = shape(logits, fields_of(params, prompts, outputs))
    expected = np.stack([naive(logits[i].numpy(), *row) for i, row in enumerate(rows)])
    if result is None:
        assert (expected == logits.numpy()).all()
        return
    assert (result.logits.numpy() == expected).all()
    assert (result.stuck.numpy() == np.isneginf(expected).all(-1)).all()
