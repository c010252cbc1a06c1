"""What changes logits, and what comes back beside tokens, through a whole cluster: router, both pools, client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from transformers import PreTrainedModel

from engine.engine import Engine, SequenceKind
from engine.loader import load_runner
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.errors import InvalidRequest
from pdcore.logprobs import Logprobs
from pdcore.types import RequestKey, RequestSpec, Role, SamplingParams
from protos import admin_pb2, admin_pb2_grpc
from router.client import Client, Completion, Sampling
from tests.support.local_cluster import LocalCluster
from tests.support.processes import eventually, worker_config
from tests.support.reference import load_reference
from tests.support.tiny_model import tiny_llama

PROMPT = [(7 * i) % 250 + 1 for i in range(90)]
EVERYTHING = Sampling(
    max_tokens=200,
    temperature=0.9,
    seed=11,
    ignore_eos=True,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias={65: 3.0, 66: -2.0},
    bad_words=["A", "xy"],
    logprobs=3,
    prompt_logprobs=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=40)
    roles = [(Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 1)]
    configs = [worker_config(model, role, i, scheduler=scheduler) for role, i in roles]
    with LocalCluster(model, tmp_path_factory.mktemp("cluster"), configs, forked=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return load_reference(model)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def alone(model: Path, client: Client) -> tuple[int, ...]:
    """The output of `EVERYTHING`, by one engine in this process that runs nothing else."""
    config = EngineConfig(str(model), "tiny", dtype="float32", num_blocks=64, threads=1)
    words = [client.tokenize(form) for word in EVERYTHING.bad_words for form in (word, f" {word}")]
    params = SamplingParams(
        200,
        0.9,
        seed=11,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=tuple(EVERYTHING.logit_bias.items()),
        bad_words=tuple(map(tuple, words)),
    )
    engine = Engine(load_runner(config), config)
    engine.add(RequestSpec(RequestKey("alone", 0), tuple(PROMPT), params, token_window=200), SequenceKind.GENERATE)
    tokens: list[int] = []
    while engine.has_work():
        plan = engine.schedule()
        assert plan is not None
        tokens += [token.token_id for token in engine.apply(plan, engine.execute(plan)).tokens]
    return tuple(tokens)


def check(reference: PreTrainedModel, answer: Completion, prompt: list[int]) -> None:
    """Its log-probabilities are those that `transformers` gives prompt and output."""
    tokens = [*prompt, *answer.token_ids]
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float(), -1)
    for found, first, top in ((answer.prompt_logprobs, 1, 2), (answer.logprobs, len(prompt), 3)):
        assert isinstance(found, Logprobs)
        count = len(prompt) - 1 if first == 1 else len(answer.token_ids)
        assert (found.start, len(found), found.top) == (1 if first == 1 else 0, count, top)
        rows = logprobs[first - 1 : first - 1 + count]
        expected = rows[torch.arange(count), torch.tensor(tokens[first : first + count])]
        assert torch.allclose(torch.tensor(found.values), expected, atol=1e-3)
        values, ids = rows.topk(top)
        assert torch.allclose(torch.tensor(found.top_values).view(count, top), values, atol=1e-3)
        same = torch.tensor(found.top_ids).view(count, top) == ids
        assert same.float().mean() > 0.99  # all but near ties


def test_everything_through_both_pools_and_after_the_decode_workers_death(
    cluster: LocalCluster, client: Client, model: Path, reference: PreTrainedModel
) -> None:
    first = client.complete(PROMPT, EVERYTHING)
    assert first.end.timeline.mode == "disaggregated"
    assert first.end.usage.completion_tokens == 200
    check(reference, first, PROMPT)
    assert first.token_ids == alone(model, client)
    alphabet = client.tokenize("A") + client.tokenize(" A")
    assert not set(first.token_ids) & {alphabet[0]}
    # The prompt is in both workers' prefix caches now, and is computed all the same, since it is to be scored.
    again = client.complete(PROMPT, EVERYTHING)
    assert (again.token_ids, again.end.usage.cached_tokens) == (first.token_ids, 0)
    assert again.end.timeline.mode == "disaggregated"
    check(reference, again, PROMPT)

    tokens: list[int] = []
    scored: list[int] = []
    places: list[int] = []
    killed = False
    for event in client.generate(PROMPT, EVERYTHING):
        tokens.extend(event.token_ids)
        assert len(event.logprobs.values) == len(event.token_ids)
        if event.token_ids:
            places.append(event.logprobs.start)
            assert event.logprobs.start == event.token_index
        scored.extend(
            range(event.prompt_logprobs.start, event.prompt_logprobs.start + len(event.prompt_logprobs.values))
        )
        if len(tokens) >= 5 and not killed:
            killed = True
            kill_the_decoder(cluster)
        last = event
    assert last.end.timeline.replays == 1
    assert tuple(tokens) == first.token_ids
    assert places[0] == 0
    assert scored == list(range(1, len(PROMPT)))
    for worker in cluster.of_role(Role.DECODE):
        if not worker.running:
            worker.stop()
            worker.begin()
            worker.wait_ready()
    cluster.wait_connected()


def kill_the_decoder(cluster: LocalCluster) -> None:
    """Kill the decode worker that runs something."""
    with grpc.insecure_channel(cluster.address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)

        def busy() -> str | None:
            status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30.0)
            found = [w.worker.worker_id for w in status.workers if w.worker.worker_id[0] == "d" and w.load.running]
            return found[0] if found else None

        worker_id = eventually(busy, 5.0, "a decode worker runs the request", interval_s=0.002)
    cluster.workers[worker_id].kill()


def test_short_prompts_and_single_tokens(client: Client, reference: PreTrainedModel) -> None:
    one = client.complete([5], Sampling(max_tokens=1, temperature=0.0, logprobs=3, prompt_logprobs=2))
    assert one.prompt_logprobs is None  # nothing stands before its only token
    assert one.logprobs is not None
    assert one.logprobs.top_ids[0] == one.token_ids[0]
    two = client.complete(
        [5, 6], Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    )
    check(reference, two, [5, 6])


def test_text_options(client: Client) -> None:
    plain = client.complete(PROMPT, Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
    printable = [i for i, token in enumerate(plain.token_ids) if token < 94 and i > 4]
    stop = client.detokenize([plain.token_ids[printable[0]]])
    kept = client.complete(
        PROMPT,
        Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop], include_stop_str_in_output=True),
    )
    cut = client.complete(PROMPT, Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop]))
    assert kept.text == cut.text + stop
    assert kept.finish_reason == cut.finish_reason == "stop"
    special = client.complete(
        PROMPT,
        Sampling(max_tokens=2, temperature=0.0, allowed_token_ids=[257], ignore_eos=True, skip_special_tokens=False),
    )
    assert special.text == "<|eos|><|eos|>"
    end = client.complete(
        PROMPT,
        Sampling(
            temperature=0.0, allowed_token_ids=[257], skip_special_tokens=False, include_stop_str_in_output=True
        ),
    )
    assert (end.text, end.finish_reason) == ("<|eos|>", "stop")


def test_a_request_that_excludes_every_token_fails_alone(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="excludes every token at position 91"):
        client.complete(PROMPT, Sampling(max_tokens=5, temperature=0.0, allowed_token_ids=[65], bad_words=["bb"]))
    assert client.complete(PROMPT, Sampling(max_tokens=3)).token_ids
