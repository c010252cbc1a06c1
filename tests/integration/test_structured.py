"""Structured outputs end to end: through prefill worker, transfer and decode worker, over real gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from pdcore.errors import InvalidRequest
from pdcore.structured import StructuredOutput
from pdcore.types import Role
from protos import generation_pb2, worker_pb2
from protos.convert import structured_to_proto
from router.client import Client, Sampling
from tests.support.generate import Outcome, generate
from tests.support.local_cluster import LocalCluster
from tests.support.processes import worker_config
from tests.support.structures import EXAMPLES, LARK, SCHEMA, choice
from tests.support.tiny_model import tiny_llama

STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH
PROMPT = [(7 * i) % 250 + 1 for i in range(50)]


def message(output: StructuredOutput) -> worker_pb2.StructuredOutput:
    made = structured_to_proto(output)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalCluster]]:
    model, folder = tiny_llama(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("structured")
    # Without a cache the one prompt of all these tests takes the whole way every time.
    roles = ((Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 1))
    split = [worker_config(model, role, index, prefix_cache=False) for role, index in roles]
    with (
        LocalCluster(model, folder, split, forked=True) as pools,
        LocalCluster(model, folder, [worker_config(model, Role.AGGREGATED)], forked=True) as whole,
    ):
        yield {"split": pools, "whole": whole}


def structured(cluster: LocalCluster, output: StructuredOutput, max_tokens: int = 160, seed: int = 3) -> Outcome:
    return generate(
        cluster.address,
        PROMPT,
        max_tokens,
        temperature=0.8,
        seed=seed,
        ignore_eos=False,
        structured_output=message(output),
    )


def test_every_kind_has_its_form_and_pools_equal_one_worker(clusters: dict[str, LocalCluster]) -> None:
    ended = set()
    with ThreadPoolExecutor(8) as pool:
        free = pool.submit(generate, clusters["split"].address, PROMPT, 30)
        pairs = {
            name: [pool.submit(structured, clusters[where], example.output) for where in ("split", "whole")]
            for name, example in EXAMPLES.items()
        }
        for name, (split, whole) in pairs.items():
            outcome = split.result()
            assert outcome.error is None, outcome
            assert outcome.end is not None
            assert outcome.end.timeline.mode == "disaggregated"
            assert outcome.tokens == whole.result().tokens, name
            assert outcome.text == whole.result().text
            if outcome.end.finish_reason == STOP:
                assert EXAMPLES[name].fits(outcome.text), outcome.text
                ended.add(name)
            else:
                assert EXAMPLES[name].unbounded
    assert {"json schema", "choice", "gbnf"} <= ended
    alone = generate(clusters["whole"].address, PROMPT, 30)
    assert free.result().tokens == alone.tokens, "a free request beside structured ones is what it is alone"
    for cluster in clusters.values():
        cluster.assert_baseline(10.0)


def test_an_output_of_one_token(clusters: dict[str, LocalCluster]) -> None:
    """It ends on the prefill worker; the token is text, not a stop token."""
    outcome = structured(clusters["split"], choice("x"))
    assert (outcome.text, len(outcome.tokens)) == ("x", 1)
    assert outcome.end is not None
    assert outcome.end.finish_reason == STOP
    clusters["split"].assert_baseline(10.0)


def test_max_tokens_cuts_it(clusters: dict[str, LocalCluster]) -> None:
    outcome = structured(clusters["split"], EXAMPLES["json schema"].output, max_tokens=5)
    assert outcome.end is not None
    assert outcome.end.finish_reason == LENGTH
    assert outcome.text.startswith("{")


def test_a_bad_one_is_refused_and_named(clusters: dict[str, LocalCluster]) -> None:
    with Client(clusters["split"].address) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.complete(PROMPT, Sampling(regex="(", max_tokens=5))
        assert caught.value.field == "sampling.structured_output.regex"
        completion = client.complete(PROMPT, Sampling(choice=["yes", "no"], max_tokens=9))
        assert completion.text in ("yes", "no")


def test_a_worker_killed_in_the_middle(clusters: dict[str, LocalCluster]) -> None:
    """The other decode worker takes the tokens that there are and goes on: the output is the undisturbed one."""
    cluster, form = clusters["split"], message(EXAMPLES["json object"].output)
    expected = generate(clusters["whole"].address, PROMPT, 300, temperature=0.8, seed=5, structured_output=form)
    with Client(cluster.address) as client:
        sampling = Sampling(max_tokens=300, temperature=0.8, seed=5, ignore_eos=True, json_object=True)
        tokens: list[int] = []
        victim = None
        for event in client.generate(PROMPT, sampling):
            tokens.extend(event.token_ids)
            if victim is None and len(tokens) > 20:
                busy = [w for w in cluster.of_role(Role.DECODE) if _running(cluster, w)]
                (victim,) = busy
                victim.kill()
            end = event.end
        assert victim is not None
        assert end.timeline.replays == 1
    assert tokens == expected.tokens


def _running(cluster: LocalCluster, worker) -> bool:  # type: ignore[no-untyped-def]
    with cluster.probe(worker) as probe:
        probe.wait(lambda: probe.load is not None, 5.0, "a report")
        load = probe.load
        return load is not None and load.running + load.paused > 0


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_demo_model_answers_in_the_form_asked_for(demo_model: Path, tmp_path: Path) -> None:
    config = worker_config(demo_model, Role.AGGREGATED, dtype="bfloat16", served_name="smollm2-135m")
    question = "Describe a person called Ann, who is 31, as JSON with name, age, tags and seen."
    chat = [{"role": "user", "content": question}]
    with LocalCluster(demo_model, tmp_path, [config]) as cluster, Client(cluster.address) as client:
        greedy = {"temperature": 0.0, "max_tokens": 60}
        answer = client.complete(chat, Sampling(json_schema=SCHEMA, **greedy))
        assert answer.finish_reason == "stop", answer.text
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        answer = client.complete(chat, Sampling(json_object=True, temperature=0.0, max_tokens=20))
        assert answer.text.startswith("{")
        answer = client.complete("Is water wet? Answer:", Sampling(choice=["yes", "no", "maybe"], **greedy))
        assert answer.text in ("yes", "no", "maybe")
        answer = client.complete("The year of the moon landing:", Sampling(regex=r" ?(19|20)\d\d", **greedy))
        assert re.fullmatch(r" ?(19|20)\d\d", answer.text)
        answer = client.complete("Two and two:", Sampling(grammar=LARK, **greedy))
        assert re.fullmatch(r"[0-9+()-]+", answer.text)
