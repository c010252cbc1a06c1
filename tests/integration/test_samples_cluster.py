"""Several samples of one request through a router and real workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdcore.config import SchedulerConfig
from pdcore.types import Role
from router.client import Client, Sampling
from tests.support.local_cluster import LocalCluster
from tests.support.processes import worker_config
from tests.support.tiny_model import tiny_llama

SCHEDULER = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=40, max_num_seqs=8)
CHOICES = ("yes", "no", "maybe")


def prompt_of(number: int, tokens: int = 90) -> list[int]:
    return [(7 * i + number * 13 + i * number) % 250 + 1 for i in range(tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["aggregated", "two pools"])
def client(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Client]:
    roles = [Role.AGGREGATED] if request.param == "aggregated" else [Role.PREFILL, Role.DECODE]
    configs = [worker_config(model, role, 0, scheduler=SCHEDULER) for role in roles]
    with LocalCluster(model, tmp_path, configs, forked=True, max_replays=0) as cluster, Client(cluster.address) as it:
        yield it


def test_log_probabilities_of_the_prompt_come_with_the_first_sample(client: Client) -> None:
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    alone = client.complete(prompt_of(1), sampling)
    answers = client.samples(prompt_of(1), replace(sampling, n=3))
    assert answers[0].token_ids == alone.token_ids
    assert answers[0].prompt_logprobs is not None
    assert alone.prompt_logprobs is not None
    assert answers[0].prompt_logprobs.values == pytest.approx(alone.prompt_logprobs.values, abs=1e-4)
    assert [answer.prompt_logprobs for answer in answers[1:]] == [None, None]
    assert [len(answer.logprobs.values) for answer in answers if answer.logprobs] == [12] * 3


def test_each_sample_has_a_structured_output_of_its_own(client: Client) -> None:
    answers = client.samples(prompt_of(4), Sampling(max_tokens=12, temperature=2.0, seed=2, n=6, choice=CHOICES))
    assert {answer.text for answer in answers} <= set(CHOICES)
    assert len({answer.text for answer in answers}) > 1
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_a_ticket_that_no_pool_holds_does_not_starve(model: Path, tmp_path: Path) -> None:
    """16 samples of 90 tokens take 22 blocks at once, of a pool of 16: they run as a whole beside other traffic."""
    configs = [worker_config(model, role, 0, scheduler=SCHEDULER) for role in (Role.PREFILL, Role.DECODE)]
    configs[1] = replace(configs[1], engine=replace(configs[1].engine, num_blocks=16))
    with LocalCluster(model, tmp_path, configs, forked=True) as cluster, Client(cluster.address) as client:
        stop = threading.Event()

        def traffic(number: int) -> None:
            while not stop.is_set():
                number += 1
                client.complete(prompt_of(number, 20), Sampling(max_tokens=20, ignore_eos=True), timeout_s=60)

        threads = [threading.Thread(target=traffic, args=(100 * k,)) for k in (1, 2)]
        for thread in threads:
            thread.start()
        try:
            sampling = Sampling(max_tokens=5, temperature=1.0, seed=3, n=16, ignore_eos=True)
            answers = client.samples(prompt_of(16), sampling, timeout_s=60)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert {len(answer.token_ids) for answer in answers} == {5}
        assert {answer.end.timeline.reason for answer in answers} == {"kv_reservation_too_large"}
