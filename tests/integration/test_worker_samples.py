"""Several samples of one request between a real prefill and a real decode worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcore.config import SchedulerConfig
from pdcore.types import Branch, RequestKey, RequestSpec
from protos import worker_pb2
from tests.integration.test_worker_pair import Pair, running_pair
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama

N = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    scheduler = SchedulerConfig(max_num_batched_tokens=128, prefill_chunk_tokens=48, max_num_seqs=32)
    with running_pair(model, p={"scheduler": scheduler}, d={"scheduler": scheduler}) as pair:
        yield pair


def trunk_of(spec: RequestSpec, n: int = N) -> RequestSpec:
    branches = tuple(Branch(RequestKey(f"{spec.key.request_id}#{i}", 0), i) for i in range(n))
    return replace(spec, branches=branches)


def outputs(pair: Pair, spec: RequestSpec) -> list[list[int]]:
    return [pair.d.wait_finished(key.request_id) for key in spec.branch_keys]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50, 130])
def test_each_sample_is_what_it_is_alone(pair: Pair, length: int) -> None:
    params = {"temperature": 1.0, "seed": 11}
    spec = trunk_of(spec_of(prompt_of(length, length), **params))
    pair.run(spec)
    found = outputs(pair, spec)
    whole = trunk_of(spec_of(prompt_of(length, length), **params))
    pair.d.generate(whole)
    assert outputs(pair, whole) == found
    for sample, output in enumerate(found):
        alone = replace(spec_of(prompt_of(length, length), **params), sample=sample)
        pair.run(alone)
        assert pair.d.wait_finished(alone.key.request_id) == output
        assert pair.p.tokens_of(spec.branch_keys[sample].request_id) == {0: output[0]}
    assert len({tuple(output) for output in found}) > 1
    received = [n for n in pair.d.notices if n.HasField("kv_received") and n.request_id == spec.key.request_id]
    assert len(received) == 1, "one transfer"
    pair.at_rest()


@pytest.mark.parametrize("whose", ["p", "d"])
def test_a_trunk_that_is_aborted_leaves_nothing(pair: Pair, whose: str) -> None:
    spec = trunk_of(spec_of(prompt_of(130, 1)))
    reply = pair.d.reserve(spec)
    pair.p.prefill(spec, reply.granted)
    for session in (pair.p, pair.d) if whose == "p" else (pair.d, pair.p):
        session.abort(spec.key.request_id)
    for key in spec.branch_keys:
        pair.d.abort(key.request_id)
    pair.at_rest()


def test_a_sample_that_is_aborted_before_the_commit_never_runs(pair: Pair) -> None:
    spec = trunk_of(spec_of(prompt_of(20, 1)))
    reply = pair.d.reserve(spec)
    pair.d.abort(spec.branch_keys[1].request_id)
    pair.p.prefill(spec, reply.granted)
    for i in (0, 2, 3):
        assert len(pair.d.wait_finished(spec.branch_keys[i].request_id)) == spec.params.max_tokens
    pair.at_rest()
    assert pair.d.tokens_of(spec.branch_keys[1].request_id) == {}


def test_the_session_takes_the_samples_with_it(pair: Pair) -> None:
    from tests.support.session_client import SessionClient

    spec = trunk_of(spec_of(prompt_of(20, 1), max_tokens=400))
    with SessionClient(pair.decode_worker.address, "other") as other:
        other.generate(spec)
        other.wait(lambda: all(other.tokens_of(key.request_id) for key in spec.branch_keys), 10.0, "tokens of all")
    pair.at_rest()


def test_a_key_that_is_here_already_is_refused(pair: Pair) -> None:
    running = spec_of(prompt_of(20, 1), max_tokens=300)
    pair.d.generate(running)
    spec = trunk_of(spec_of(prompt_of(20, 1)))
    spec = replace(spec, branches=(Branch(running.key, 0), *spec.branches))
    reply = pair.d.reserve(spec)
    assert reply.refused.code == worker_pb2.FAILURE_CODE_INVALID
    assert "branches" in reply.refused.message
    pair.d.abort(running.key.request_id)
    pair.at_rest()
