"""A prefill worker runs requests as a whole, as when no decode worker serves, and sends prompts beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcore.config import SchedulerConfig
from protos import worker_pb2
from tests.integration.test_worker_pair import Pair, running_pair
from tests.integration.test_worker_samples import trunk_of
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    scheduler = SchedulerConfig(max_num_batched_tokens=128, prefill_chunk_tokens=48, max_num_seqs=32)
    with running_pair(model, p={"scheduler": scheduler, "num_blocks": 40}, d={"scheduler": scheduler}) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 16, 50, 130])
def test_its_tokens_are_those_of_a_decode_worker(pair: Pair, length: int) -> None:
    params = {"temperature": 1.0, "seed": 7}
    there, here, sent = (spec_of(prompt_of(length, length), **params) for _ in range(3))
    pair.d.generate(there)
    pair.p.generate(here)
    pair.run(sent)
    expected = pair.d.wait_finished(there.key.request_id)
    assert pair.p.wait_finished(here.key.request_id) == expected
    assert pair.d.wait_finished(sent.key.request_id) == expected, "beside it"
    assert pair.p.tokens_of(sent.key.request_id) == {0: expected[0]}
    pair.at_rest()


def test_samples(pair: Pair) -> None:
    params = {"temperature": 1.0, "seed": 11}
    there, here = (trunk_of(spec_of(prompt_of(40, 1), **params)) for _ in range(2))
    pair.d.generate(there)
    pair.p.generate(here)
    outputs = [
        [session.wait_finished(key.request_id) for key in spec.branch_keys]
        for session, spec in ((pair.d, there), (pair.p, here))
    ]
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) > 1
    pair.at_rest()


def test_it_waits_for_credit_and_ends_when_it_is_told_to(pair: Pair) -> None:
    spec = spec_of(prompt_of(20), max_tokens=30)
    pair.p.generate(replace(spec, token_window=5))
    pair.p.wait(lambda: len(pair.p.tokens_of(spec.key.request_id)) == 5, 10.0, "a full window")
    pair.p.wait(lambda: pair.p.load is not None and pair.p.load.paused == 1, 5.0, "a pause")
    for seen in range(5, 30, 5):
        pair.p.credit(spec.key.request_id, 5)
        pair.p.wait(lambda seen=seen: len(pair.p.tokens_of(spec.key.request_id)) == seen + 5, 10.0, "five more")
    assert len(pair.p.wait_finished(spec.key.request_id)) == 30
    endless = spec_of(prompt_of(20), max_tokens=400)
    pair.p.generate(endless)
    pair.p.wait(lambda: len(pair.p.tokens_of(endless.key.request_id)) > 3, 10.0, "some tokens")
    pair.p.abort(endless.key.request_id)
    trunk = trunk_of(spec_of(prompt_of(130), max_tokens=400))
    pair.p.generate(trunk)
    pair.p.abort(trunk.key.request_id)
    for key in trunk.branch_keys:
        pair.p.abort(key.request_id)
    pair.at_rest()


def test_more_than_its_cache_holds_run_one_after_the_other(pair: Pair) -> None:
    """Forty blocks of 16 tokens: the sequences outgrow them, are preempted and go on."""
    specs = [spec_of(prompt_of(60, seed), max_tokens=100) for seed in range(6)]
    for spec in specs:
        pair.p.generate(spec)
    outputs = [pair.p.wait_finished(spec.key.request_id) for spec in specs]
    for spec, output in zip(specs, outputs, strict=True):
        again = spec_of(spec.prompt, max_tokens=100)
        pair.d.generate(again)
        assert pair.d.wait_finished(again.key.request_id) == output
    assert pair.p.load is not None
    assert pair.p.load.preemptions > 0
    pair.at_rest()


def test_what_cannot_run_here_is_refused(pair: Pair) -> None:
    large = spec_of(prompt_of(200), max_tokens=600)
    pair.p.generate(large)
    pair.p.wait(lambda: pair.p.failure_of(large.key.request_id), 5.0, "refusal")
    failure = pair.p.failure_of(large.key.request_id)
    assert failure is not None
    assert failure.code == worker_pb2.FAILURE_CODE_INVALID
    pair.at_rest()
