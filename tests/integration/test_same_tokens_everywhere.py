"""One seed, one output: alone, in any batch and order, through both pools, after a preemption and after a replay.

On a real model in fp32, with everything that changes logits; and against `transformers`, which generates the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.engine import Engine, SequenceKind
from engine.loader import load_runner
from engine.runner import CpuModelRunner
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.logprobs import Logprobs, joined
from pdcore.types import RequestKey, RequestSpec, SamplingParams
from tests.support.reference import load_reference
from tests.support.tiny_model import tiny_llama

GENERATE, PREFILL = SequenceKind.GENERATE, SequenceKind.PREFILL

KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "output penalties": {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "bias": {"temperature": 1.0, "logit_bias": ((5, 4.0), (6, 4.0), (7, -9.0)), "logprobs": 3},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(20, 60)), "bad_words": ((21,), (22, 23))},
    "bad words": {"temperature": 0.0, "bad_words": ((5,), (9, 10)), "repetition_penalty": 1.5, "logprobs": 0},
    "no early stop": {"temperature": 1.2, "stop_token_ids": tuple(range(0, 512, 5)), "min_tokens": 10},
    "everything": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((1, 2.0),),
        "bad_words": ((30, 31), (40,)),
        "logprobs": 5,
        "prompt_logprobs": 2,
    },
}
MAX_TOKENS = 32


def specs() -> list[RequestSpec]:
    made = []
    for i, (name, params) in enumerate(KINDS.items()):
        prompt = tuple((31 * t + 97 * i + t * t) % 250 + 1 for t in range(3 + 9 * i))
        made.append(
            RequestSpec(RequestKey(name, 0), prompt, SamplingParams(MAX_TOKENS, seed=1000 + i, **params))  # type: ignore[arg-type]
        )
    return made


SPECS = specs()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return load_reference(model)


def runner_of(model: Path, num_blocks: int = 128, block_size: int = 16) -> CpuModelRunner:
    config = EngineConfig(
        str(model), "tiny", dtype="float32", num_blocks=num_blocks, block_size=block_size, threads=1
    )
    return load_runner(config)


@pytest.fixture(scope="module")
def runner(model: Path) -> CpuModelRunner:
    return runner_of(model)


def engine_of(runner: CpuModelRunner, budget: int = 512, chunk: int = 512, max_num_seqs: int = 16) -> Engine:
    config = EngineConfig("tiny", "tiny", scheduler=SchedulerConfig(budget, max_num_seqs, chunk))
    return Engine(runner, config)


class Output:
    """What an engine says of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.prompt: list[Logprobs] = []


def drive(engine: Engine, add: Iterable[RequestSpec] = (), kind: SequenceKind = GENERATE) -> dict[str, Output]:
    """Add the requests, one more before each step, and step until nothing is left to do."""
    outputs: dict[str, Output] = {}
    coming = list(add)
    while coming or engine.has_work():
        if coming:
            engine.add(coming.pop(0), kind)
        plan = engine.schedule()
        assert plan is not None
        result = engine.apply(plan, engine.execute(plan))
        assert not result.rejected
        for token in result.tokens:
            out = outputs.setdefault(token.key.request_id, Output())
            out.tokens.append(token.token_id)
            if token.logprobs is not None:
                out.logprobs.append(token.logprobs)
        for scored in result.prompt_logprobs:
            outputs.setdefault(scored.key.request_id, Output()).prompt.append(scored.logprobs)
    return outputs


def tokens_of(outputs: dict[str, Output]) -> dict[str, list[int]]:
    return {name: output.tokens for name, output in outputs.items()}


@pytest.fixture(scope="module")
def alone(runner: CpuModelRunner) -> dict[str, Output]:
    """Each by itself."""
    return {spec.key.request_id: drive(engine_of(runner), [spec])[spec.key.request_id] for spec in SPECS}


@pytest.fixture(scope="module")
def expected(alone: dict[str, Output]) -> dict[str, list[int]]:
    return tokens_of(alone)


def test_the_options_have_an_effect(expected: dict[str, list[int]]) -> None:
    """Else the tests below would show little."""
    assert len(set(map(tuple, expected.values()))) == len(SPECS)
    assert set(expected["allowed"]) <= set(range(20, 60)) - {21}
    for name, words in (("allowed", [[22, 23]]), ("bad words", [[5], [9, 10]]), ("everything", [[30, 31], [40]])):
        text = expected[name]
        assert not any(text[i : i + len(word)] == word for word in words for i in range(len(text)))
    assert len(set(expected["repetition"])) > len(set(expected["greedy"])) or expected["greedy"] == []
    early = next(i for i, token in enumerate(expected["no early stop"]) if token % 5 == 0)
    assert early == len(expected["no early stop"]) - 1 >= 10


@pytest.mark.parametrize(
    ("order", "budget", "chunk"), [("as they are", 512, 512), ("reversed", 40, 17), ("shuffled", 64, 48)]
)
def test_in_any_batch_and_order(
    runner: CpuModelRunner, expected: dict[str, list[int]], order: str, budget: int, chunk: int
) -> None:
    arranged = {"as they are": SPECS, "reversed": SPECS[::-1], "shuffled": SPECS[5:] + SPECS[:5]}[order]
    assert tokens_of(drive(engine_of(runner, budget, chunk), arranged)) == expected


def test_through_prefill_and_decode(
    model: Path, runner: CpuModelRunner, expected: dict[str, list[int]], alone: dict[str, Output]
) -> None:
    source_runner = runner_of(model)
    source, target = engine_of(source_runner, 64, 32), engine_of(runner)
    firsts = drive(source, SPECS, PREFILL)
    outputs: dict[str, Output] = {}
    for spec in SPECS:
        reserved = target.reserve(spec.key.request_id, spec)
        assert reserved is not None
        table = source.block_table(spec.key)
        assert table is not None
        layers, known = runner.geometry.num_layers, len(spec.prompt)
        runner.cache.scatter(0, reserved.blocks, 0, source_runner.cache.gather(0, layers, table, 0, known))
        source.release_send(spec.key)
        target.commit_ticket(spec.key.request_id, spec, firsts[spec.key.request_id].tokens[0])
    outputs = drive(target)
    assert tokens_of(outputs) == expected
    for name, output in outputs.items():
        before = firsts[name]
        assert [part.start for part in before.logprobs + output.logprobs] == [
            part.start for part in alone[name].logprobs
        ]
        assert bool(before.prompt) == bool(alone[name].prompt)
        assert not output.prompt


def test_after_preemptions(model: Path, expected: dict[str, list[int]]) -> None:
    """Each beside its twin, in a pool that both fit into and cannot both grow in."""
    preempted = []
    for spec in SPECS:
        name = spec.key.request_id
        admitted = -(-(len(spec.prompt) + 1) // 8)
        engine = engine_of(runner_of(model, num_blocks=2 * admitted + 3, block_size=8), 64, 32)
        outputs = drive(engine, [spec, replace(spec, key=RequestKey("twin", 0), cache_salt="its own")])
        assert tokens_of(outputs) == {name: expected[name], "twin": expected[name]}
        if engine.load().preemptions:
            preempted.append(name)
        for output in outputs.values():
            assert [part.start for part in output.logprobs] == list(range(len(output.logprobs)))
            if spec.params.prompt_logprobs is not None:
                scored = joined(output.prompt)
                assert (scored.start, scored.end) == (1, len(spec.prompt))
    assert len(preempted) >= len(SPECS) - 1, preempted  # one kind may end before it grows


@pytest.mark.parametrize("delivered", [1, 9])
def test_after_a_replay(runner: CpuModelRunner, expected: dict[str, list[int]], delivered: int) -> None:
    """Delivered tokens count as output: penalties, bad words and min_tokens go on where they were."""
    again = [
        replace(
            spec, key=RequestKey(spec.key.request_id, 1), delivered=tuple(expected[spec.key.request_id][:delivered])
        )
        for spec in SPECS
        if len(expected[spec.key.request_id]) > delivered
    ]
    outputs = drive(engine_of(runner, 64, 32), again)
    assert tokens_of(outputs) == {spec.key.request_id: expected[spec.key.request_id][delivered:] for spec in again}


def likeliest(logits: torch.Tensor, token: int, top: int) -> tuple[float, list[int], list[float]]:
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(top)
    return float(logprobs[token]), ids.tolist(), values.tolist()


def check_logprobs(parts: Sequence[Logprobs], logits: torch.Tensor, tokens: Sequence[int], top: int) -> None:
    """`logits` [N, V] are those that predict `tokens`, which begin at the parts' start."""
    found = joined(parts)
    assert len(found) == len(tokens)
    for i, token in enumerate(tokens):
        value, ids, values = likeliest(logits[i], token, top)
        assert found.values[i] == pytest.approx(value, abs=1e-3)
        assert list(found.top_ids[i * top : (i + 1) * top]) == ids
        assert found.top_values[i * top : (i + 1) * top] == pytest.approx(values, abs=1e-3)


def test_log_probabilities_are_those_of_transformers(
    runner: CpuModelRunner, reference: PreTrainedModel, alone: dict[str, Output]
) -> None:
    """Of the model's own distribution, whatever bias and penalties made of it."""
    together = drive(engine_of(runner, 40, 17), SPECS)
    for spec in SPECS:
        name, params = spec.key.request_id, spec.params
        for output in (alone[name], together[name]):
            known = [*spec.prompt, *output.tokens]
            with torch.inference_mode():
                logits = reference(torch.tensor([known])).logits[0].float()
            if params.logprobs is not None:
                check_logprobs(output.logprobs, logits[len(spec.prompt) - 1 :], output.tokens, params.logprobs)
            else:
                assert not output.logprobs
            if params.prompt_logprobs is not None:
                check_logprobs(output.prompt, logits, spec.prompt[1:], params.prompt_logprobs)
            else:
                assert not output.prompt


def test_greedy_with_penalties_is_what_transformers_generates(
    runner: CpuModelRunner, reference: PreTrainedModel
) -> None:
    for seed, prompt in enumerate(([3, 9, 27], list(range(40, 90)), [7] * 20)):
        penalty, bias, words = 1.0 + 0.2 * (seed + 1), {11 + seed: 3.0, 50: -4.0}, [[12 + seed], [60, 61]]
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            min_new_tokens=30,
            repetition_penalty=penalty,
            sequence_bias={(token,): value for token, value in bias.items()},
            bad_words_ids=words,
            pad_token_id=0,
        )
        params = SamplingParams(
            30,
            0.0,
            stop_token_ids=(257,),
            min_tokens=30,
            repetition_penalty=penalty,
            logit_bias=tuple(bias.items()),
            bad_words=tuple(map(tuple, words)),
        )
        spec = RequestSpec(RequestKey(f"t{seed}", 0), tuple(prompt), params)
        assert drive(engine_of(runner), [spec])[f"t{seed}"].tokens == generated[0, len(prompt) :].tolist()
