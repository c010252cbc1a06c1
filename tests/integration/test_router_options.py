"""What the configuration says and what workers report arrives where a router decides: its pure modules do as told, if
they are told. Null workers, real gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pdcore.classes import ClassObjective, ClassObjectives
from pdcore.errors import Overloaded
from pdcore.step_time import MIN_STEPS, StepTime
from pdcore.types import RequestKey, Role
from protos import worker_pb2
from protos.convert import step_time_to_proto
from router import queue_pump
from router.client import Sampling
from router.policy import RouteRequest
from router.rebuild import FIRST_HANDOVER_MS
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.tiny_model import tiny_llama

SHORT = Sampling(max_tokens=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


class Busy(NullWorker):
    """Reports step times, and what others have there."""

    token_ms = 10.0
    others_queued = others_running = 0

    def _load(self) -> worker_pb2.Load:
        load = super()._load()
        step_time = StepTime(token_ms=self.token_ms, steps=MIN_STEPS, largest=self.max_num_batched_tokens)
        load.step_time.CopyFrom(step_time_to_proto(step_time))
        load.queued_prefill_tokens += self.others_queued
        load.running += self.others_running
        return load


class Gate:
    """A hook that holds requests at their tokens until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.reached: set[str] = set()

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if point == "token" and index == 1:
            self.reached.add(key.request_id)
            await self.opened.wait()


async def reports(cluster: NullCluster, **queued: int) -> None:
    """Until the router has heard of what others have queued, and of nothing else."""

    def heard() -> bool:
        found = {worker.worker_id: worker for worker in cluster.dispatcher.pool.snapshots()}
        return (
            all(
                (found[name].requests, found[name].load.queued_prefill_tokens) == (0, tokens)
                for name, tokens in queued.items()
            )
            and cluster.dispatcher.pool.fleet().measured
        )

    for name, tokens in queued.items():
        cluster[name].others_queued = tokens  # type: ignore[attr-defined]
    await until(heard, "the workers have reported")


@pytest.mark.parametrize(
    ("policy", "takers"),
    [
        ("cost", {"fast"}),
        ("least_loaded", {"idle"}),
        ("power_of_two", {"idle", "fast"}),
        ("prefix_affinity", {"home"}),
        ("round_robin", {"idle", "fast", "home"}),
    ],
)
async def test_each_policy_takes_another_worker(model: Path, policy: str, takers: set[str]) -> None:
    """One has nothing to do, one is as fast as ten, one has the prompt: what each policy is for."""
    workers = {name: Busy(name, Role.AGGREGATED) for name in ("idle", "fast", "home")}
    workers["idle"].token_ms = 100.0
    prompt, taken = [7] * 64, Counter[str]()
    async with NullCluster(model, list(workers.values()), policy=policy, max_queued_prefill_tokens=9000) as cluster:
        for _ in range(3 if policy == "prefix_affinity" else 0):  # it is sent to one of them, who is its home
            await reports(cluster, idle=900, fast=900, home=0)
            await cluster.client.complete(prompt, SHORT)
        for _ in range(30 if policy == "power_of_two" else 9):  # each pair of three is drawn time and again
            await reports(cluster, idle=0, fast=300, home=900)
            answer = await cluster.client.complete(prompt, SHORT)
            taken[answer.end.timeline.decode_worker] += 1
    assert set(taken) == takers, taken
    if policy == "round_robin":
        assert set(taken.values()) == {3}


async def test_what_transfers_took_is_known_to_the_choice(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RouteRequest] = []
    choose = queue_pump.choose

    def noted(request: RouteRequest, fleet: object) -> object:
        asked.append(request)
        return choose(request, fleet)  # type: ignore[arg-type]

    monkeypatch.setattr(queue_pump, "choose", noted)
    async with NullCluster(model, pair()) as cluster:
        dispatcher = cluster.dispatcher
        for number in range(3):
            await cluster.client.complete([number] * 20, SHORT)
        links, numbers = asked[-1].links, dispatcher.pool.numbers
        assert links is not None
        assert links.usual > 0
        prefill, decode = (numbers.take(name) for name in ("p0", "d0"))
        assert links.of(prefill)[decode] > 0  # type: ignore[index]
        assert asked[0].handover_ms == FIRST_HANDOVER_MS
        assert asked[-1].handover_ms != FIRST_HANDOVER_MS
        await cluster["d0"].crash()
        await until(lambda: dispatcher.pool.snapshot("d0") is None, "it is lost")
        assert np.isnan(links.of(prefill)[decode]), "whoever gets its number is another one"  # type: ignore[index]


@pytest.mark.parametrize(("itl_ms", "reason"), [(15.0, "streams_keep_their_pace"), (0.0, "prefill_pool_busy")])
async def test_the_objective_of_streams_that_run_keeps_prompts_away(model: Path, itl_ms: float, reason: str) -> None:
    """A token takes 10 ms; the prefill pool has a queue, so the decode worker would be first if it might."""
    classes = ClassObjectives(interactive=ClassObjective(itl_ms=itl_ms), standard=ClassObjective())
    workers = [Busy("p0", Role.PREFILL), Busy("d0", Role.DECODE)]
    options = {"classes": classes, "disaggregate": "auto", "max_queued_prefill_tokens": 9000}
    async with NullCluster(model, workers, **options) as cluster:
        await reports(cluster, p0=0, d0=0)
        gate = cluster["d0"].hook = Gate()
        stream = asyncio.ensure_future(cluster.client.complete([1], SHORT, priority="interactive", request_id="s"))
        await until(lambda: gate.reached == {"s"}, "it runs")
        cluster["p0"].others_queued = 5000  # type: ignore[attr-defined]
        await until(
            lambda: cluster.dispatcher.pool.snapshot("p0").load.queued_prefill_tokens == 5000, "it has a queue"
        )
        answer = asyncio.ensure_future(cluster.client.complete([2] * 40, SHORT, request_id="a"))
        await until(lambda: "a" in gate.reached, "it runs too")
        gate.opened.set()
        assert (await answer).end.timeline.reason == reason
        await stream


async def test_the_bound_of_a_class_is_its_own(model: Path) -> None:
    classes = ClassObjectives(batch=ClassObjective(max_queue=1))
    async with NullCluster(model, pair(), classes=classes, max_running_per_worker=1, max_queue=2) as cluster:
        gate = cluster["d0"].hook = Gate()
        running = [asyncio.ensure_future(cluster.client.complete([1], SHORT, request_id="first"))]
        await until(lambda: gate.reached == {"first"}, "it runs")
        for waiting, priority in enumerate(("batch", "standard", "standard"), start=1):
            running.append(asyncio.ensure_future(cluster.client.complete([1], SHORT, priority=priority)))
            await until(lambda count=waiting: cluster.dispatcher.queued == count, "it waits")
        for priority, waiting in (("batch", 1), ("standard", 2)):
            with pytest.raises(Overloaded, match=f"{waiting} {priority} requests are waiting"):
                await cluster.client.complete([1], SHORT, priority=priority, timeout_s=10.0)
        gate.opened.set()
        await asyncio.gather(*running)


async def test_batch_goes_where_no_pace_is_broken_though_more_is_to_do_there(model: Path) -> None:
    classes = ClassObjectives(interactive=ClassObjective(itl_ms=15.0), standard=ClassObjective())
    workers = [Busy("p0", Role.PREFILL), Busy("d0", Role.DECODE), Busy("d1", Role.DECODE)]
    workers[2].others_running = 5
    async with NullCluster(model, workers, classes=classes, policy="least_loaded") as cluster:
        await until(lambda: cluster.dispatcher.pool.snapshot("d1").load.running == 5, "it has reported")
        await reports(cluster, p0=0, d0=0)
        gate = cluster["d0"].hook = Gate()
        urgent = asyncio.ensure_future(cluster.client.complete([1], SHORT, priority="interactive", request_id="u"))
        await until(lambda: gate.reached == {"u"}, "it runs where least is to do")
        answer = await cluster.client.complete([1], SHORT, priority="batch")
        assert answer.end.timeline.decode_worker == "d1"
        gate.opened.set()
        await urgent


async def test_what_was_computed_before_is_not_given_up(model: Path) -> None:
    """Its worker failed, and has a queue now that is longer than the class's objective."""
    classes = ClassObjectives(interactive=ClassObjective(ttft_ms=500.0))
    worker = Busy("a0", Role.AGGREGATED)

    def fail_once(command: str, request: worker_pb2.WorkerRequest) -> worker_pb2.FailureCode.ValueType:
        worker.refuse, worker.others_queued = None, 100_000
        return worker_pb2.FAILURE_CODE_INTERNAL

    async with NullCluster(model, [worker], classes=classes, max_queued_prefill_tokens=1) as cluster:
        await reports(cluster, a0=0)
        worker.refuse = fail_once
        replayed = asyncio.ensure_future(cluster.client.complete([1] * 10, SHORT, priority="interactive"))
        await until(lambda: cluster.dispatcher.counters.replays == 1, "it has failed")
        heard = worker._step + 5
        await until(lambda: worker._step >= heard, "the router has looked at it time and again")
        assert cluster.dispatcher.queued == 1
        worker.others_queued = 0
        assert (await replayed).end.timeline.replays == 1
