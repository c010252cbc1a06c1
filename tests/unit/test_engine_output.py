"""What the engine reports beside tokens: log-probabilities of samples and prompts, and samples that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine, SequenceKind
from engine.step import NO_TOKEN, StepOutput
from pdcore.errors import InvalidRequest
from pdcore.logprobs import Logprobs, joined
from pdcore.types import RequestKey, RequestSpec
from tests.support.engine_kit import make_engine, prefill_and_transfer, request, step, tokens_of
from tests.support.fake_runner import FakeRunner, oracle

GENERATE, PREFILL = SequenceKind.GENERATE, SequenceKind.PREFILL


class Reports:
    """Steps an engine to the end of its work and keeps what it says of each request."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: list = []
        self.prompts: dict[RequestKey, list[Logprobs]] = {}
        while engine.has_work():
            result = step(engine)
            assert result is not None
            assert not result.rejected, result.rejected
            for scored in result.prompt_logprobs:
                assert not any(token.key == scored.key for token in self.tokens), "a prompt was scored after a token"
                self.prompts.setdefault(scored.key, []).append(scored.logprobs)
            self.tokens.extend(result.tokens)

    def check(self, spec: RequestSpec) -> None:
        """Each sampled token, and each prompt token but the first, was reported once with what `fake_logprobs` is."""
        params = spec.params
        tokens_of(self.tokens, spec)
        for token in self.tokens:
            if token.key != spec.key:
                continue
            expected = None if params.logprobs is None else fake(token.index, [token.token_id], params.logprobs)
            assert token.logprobs == expected
        if params.prompt_logprobs is None or len(spec.prompt) == 1:
            assert spec.key not in self.prompts
        else:
            found = joined(self.prompts[spec.key])
            assert found == fake(1, list(spec.prompt[1:]), params.prompt_logprobs)


def fake(start: int, tokens: list[int], top: int) -> Logprobs:
    """See `fake_logprobs`."""
    likeliest = tuple(range(top)) * len(tokens)
    values = tuple(-float(token) for token in likeliest)
    return Logprobs(start, top, tuple(-float(token) for token in tokens), likeliest, values)


def test_each_gets_its_own() -> None:
    runner = FakeRunner(num_blocks=200)
    engine = make_engine(runner, budget=48, chunk=20)
    wants = [None, 0, 5, 20]
    specs = [
        request(f"r{i}", 1 + 7 * i, 4, logprobs=wants[i % 4], prompt_logprobs=wants[(i // 2) % 4]) for i in range(12)
    ]
    for spec in specs:
        engine.add(spec, GENERATE)
    reports = Reports(engine)
    for spec in specs:
        reports.check(spec)
        assert tokens_of(reports.tokens, spec) == oracle(runner, spec)[0]


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    budget=st.integers(4, 40),
    chunk=st.integers(1, 20),
    blocks=st.integers(8, 14),
)
@settings(max_examples=20, deadline=None)
def test_prompts_are_scored_once_however_they_are_cut_and_preempted(
    prompts: list[int], budget: int, chunk: int, blocks: int
) -> None:
    engine = make_engine(FakeRunner(num_blocks=blocks, block_size=8), budget=budget, chunk=chunk, max_num_seqs=4)
    specs = [request(f"r{i}", n, 20, logprobs=1, prompt_logprobs=2) for i, n in enumerate(prompts)]
    for spec in specs:
        engine.add(spec, GENERATE)
    reports = Reports(engine)
    for spec in specs:
        reports.check(spec)


def test_preemption_is_among_that() -> None:
    engine = make_engine(FakeRunner(num_blocks=6, block_size=8), budget=16, chunk=8)
    specs = [request(f"r{i}", 14, 20, prompt_logprobs=2) for i in range(3)]
    for spec in specs:
        engine.add(spec, GENERATE)
    reports = Reports(engine)
    assert engine.load().preemptions > 0
    for spec in specs:
        reports.check(spec)


def test_scored_prompts_take_nothing_from_the_prefix_cache() -> None:
    engine = make_engine(FakeRunner())
    plain = request("plain", list(range(40)), 2)
    engine.add(plain, GENERATE)
    Reports(engine)
    scored = request("scored", list(range(40)), 2, prompt_logprobs=1)
    engine.add(scored, GENERATE)
    Reports(engine).check(scored)
    assert engine.load().cached_tokens == 0
    again = request("again", list(range(40)), 2)
    engine.add(again, GENERATE)
    Reports(engine)
    assert engine.load().cached_tokens == 32


def test_a_ticket_for_a_scored_prompt_holds_nothing_yet() -> None:
    """All of the prompt is computed on the prefill worker, so all of it is sent."""
    source_runner, runner = FakeRunner(), FakeRunner()
    source, target = make_engine(source_runner), make_engine(runner)
    target.add(request("first", list(range(40)), 2), GENERATE)
    Reports(target)
    spec = request("scored", list(range(40)), 6, logprobs=0, prompt_logprobs=0)
    reserved = target.reserve("t", spec)
    assert reserved is not None
    assert reserved.prefix_tokens == 0
    assert not reserved.run_here
    first = prefill_and_transfer(source, source_runner, runner, spec, reserved.blocks)
    target.commit_ticket("t", spec, first)
    reports = Reports(target)
    assert spec.key not in reports.prompts  # they are the prefill worker's to report
    assert [token.token_id for token in reports.tokens] == oracle(runner, spec)[0]
    assert [token.logprobs is None for token in reports.tokens] == [True] + [False] * 5


def test_a_prefill_reports_its_token_and_its_prompt() -> None:
    engine = make_engine(FakeRunner(), budget=16, chunk=16)
    spec = request("r", 40, 6, logprobs=3, prompt_logprobs=1)
    engine.add(spec, PREFILL)
    reports = Reports(engine)
    reports.check(spec)
    assert len(reports.tokens) == 1
    assert [len(part) for part in reports.prompts[spec.key]] == [16, 16, 7]
    engine.release_send(spec.key)


def test_a_sample_without_any_token_left_ends_its_request_and_says_why() -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    stuck, good = request("stuck", 20), request("good", 5)
    engine.add(stuck, GENERATE)
    engine.add(good, GENERATE)
    plan = engine.schedule()
    assert plan is not None
    ids = engine.execute(plan).token_ids.copy()
    ids[[chunk.key for chunk in plan.chunks].index(stuck.key)] = NO_TOKEN
    ((key, error),) = engine.apply(plan, StepOutput(ids)).rejected
    assert key == stuck.key
    assert isinstance(error, InvalidRequest)
    assert str(error) == "sampling: excludes every token at position 20"
    engine.check_integrity()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"logit_bias": ((256, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"allowed_token_ids": (3, 256)}, "allowed_token_ids"),
        ({"bad_words": ((1,), ())}, "bad_words"),
        ({"bad_words": ((1, -1),)}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], field: str) -> None:
    engine = make_engine(FakeRunner())
    with pytest.raises(InvalidRequest) as caught:
        engine.add(request("r", 5, **params), GENERATE)
    assert caught.value.field == f"sampling.{field}"
    assert not engine.has_work()


def test_parts_of_log_probabilities() -> None:
    whole = fake(4, [7, 8, 9], 2)
    assert joined([whole.between(4, 5), whole.between(5, 7)]) == whole
    assert (len(whole), whole.end) == (3, 7)
    assert whole.well_formed
    assert not Logprobs(0, 1, (1.0,)).well_formed
    assert np.array(whole.between(6, 7).top_ids).tolist() == [0, 1]
