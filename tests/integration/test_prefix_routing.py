"""Requests go where the beginning of their prompt is cached, as real workers report it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdcore.config import SchedulerConfig
from pdcore.types import Role
from router.client import Client, Completion, Sampling
from router.prefixes import PromptNames
from tests.support.local_cluster import LocalCluster
from tests.support.null_cluster import NullCluster
from tests.support.null_worker import NullWorker
from tests.support.processes import eventually, worker_config
from tests.support.tiny_model import tiny_llama

SCHEDULER = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=64, local_prefill_tokens=0)
SHORT = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)


def document(number: int, tokens: int = 160) -> list[int]:
    return [(11 * i + 17 * number + i * number) % 250 + 1 for i in range(tokens)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("cluster")
    model = tiny_llama(folder / "model")
    configs = [worker_config(model, Role.PREFILL, number, scheduler=SCHEDULER) for number in range(3)]
    configs.append(worker_config(model, Role.DECODE, 0, scheduler=SCHEDULER))
    with LocalCluster(model, folder, configs, forked=True) as cluster, Client(cluster.address) as made:
        yield made


def where(answer: Completion) -> str:
    return str(answer.end.timeline.prefill_worker)


def test_a_conversation_stays_where_it_was_computed(client: Client) -> None:
    for number in range(4):
        talk = document(number)
        home = where(client.complete(talk, SHORT))
        for _ in range(3):
            talk = [*talk, *document(number + 50, 20)]
            answer = client.complete(talk, SHORT)
            assert where(answer) == home
            assert answer.end.usage.cached_tokens >= 160 // 16 * 16


def test_another_salt_shares_nothing(client: Client) -> None:
    talk = document(30)
    for number in range(4):
        assert client.complete(talk, SHORT, cache_salt=f"tenant {number}").end.usage.cached_tokens == 0
    assert client.complete(talk, SHORT, cache_salt="tenant 2").end.usage.cached_tokens == 144


def test_what_was_evicted_draws_nobody(tmp_path: Path) -> None:
    """Caches of ten blocks: the second prompt takes the first one's place."""
    model = tiny_llama(tmp_path / "model")
    workers = [worker_config(model, Role.PREFILL, number, scheduler=SCHEDULER, num_blocks=11) for number in range(2)]
    workers.append(worker_config(model, Role.DECODE, 0, scheduler=SCHEDULER))
    with LocalCluster(model, tmp_path, workers, forked=True) as cluster, Client(cluster.address) as client:
        prefixes = cluster.router._dispatcher._prefixes
        for number in range(1, 9):
            client.complete(document(number), SHORT)
        # Of eight prompts of ten blocks each, the prefill workers have one each, and the decode worker has all.
        eventually(lambda: prefixes.counts.known <= 11 + 11 + 8 * 10, 10, "evictions to be told")
        for number in range(1, 9):
            held = prefixes.cached(PromptNames(document(number), ""))
            assert held is not None
            assert held[prefixes.numbers.take("decode-0")] > 0
        found = {number: prefixes.cached(PromptNames(document(number), "")) for number in range(1, 9)}
        gone = [number for number, held in found.items() if np.count_nonzero(held) == 1]
        assert len(gone) >= 6
        assert client.complete(document(gone[0]), SHORT).end.usage.cached_tokens == 0


@pytest.mark.parametrize(("alike", "homes"), [(True, 1), (False, 3)])
async def test_siblings_that_arrive_together_have_one_home(tmp_path: Path, alike: bool, homes: int) -> None:
    """Workers that report nothing of their caches, and compute for a while: the router knows what it has sent."""
    workers = [NullWorker(f"p{number}", Role.PREFILL, step_s=0.3) for number in range(3)]
    async with NullCluster(tiny_llama(tmp_path / "model"), [*workers, NullWorker("d0", Role.DECODE)]) as cluster:
        prompts = [[*document(0 if alike else number, 160), number] for number in range(6)]
        answers = await asyncio.gather(*(cluster.client.complete(prompt, SHORT) for prompt in prompts))
        assert len({where(answer) for answer in answers}) == homes
