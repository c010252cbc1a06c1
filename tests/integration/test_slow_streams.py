"""A thousand clients that read nothing beside ten that read all, through the router's own gRPC face.

Nothing here goes by the clock: what counts is who has come how far, and how much is kept for whom.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from pdcore.types import Role
from protos import generation_pb2, generation_pb2_grpc
from router.client import Sampling, build_request
from router.dispatcher import Dispatcher
from tests.support.null_cluster import NullCluster, until
from tests.support.null_worker import NullWorker, token_of
from tests.support.tiny_model import tiny_llama

SLOW = 1000
FAST = 10
WINDOW = 8
MANY = 60  # tokens of a fast stream
LONG = 90  # tokens of a slow stream; none of them gets near its end
SLOW_OPTIONS = (("grpc.http2.lookahead_bytes", 128), ("grpc.http2.bdp_probe", 0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def buffered(dispatcher: Dispatcher) -> int:
    """Tokens that the router keeps for clients that have not asked for them."""
    return sum(len(active.stream._token_ids) for active in dispatcher._active.values())


async def test_a_thousand_slow_streams_cost_ten_fast_ones_nothing(model: Path) -> None:
    produced: dict[str, int] = {}

    async def count(point: str, key: object, index: int) -> None:
        if point == "token":
            produced[key.request_id] = index + 1  # type: ignore[attr-defined]

    workers = [NullWorker(f"d{n}", Role.AGGREGATED, hook=count, num_blocks=40_000, step_s=0.02) for n in range(2)]
    options = {"token_window": WINDOW, "max_running_per_worker": SLOW, "max_queue": SLOW}
    async with (
        NullCluster(model, workers, **options) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=SLOW_OPTIONS) as channel,
    ):
        dispatcher: Dispatcher = cluster.dispatcher
        stub = generation_pb2_grpc.GenerationStub(channel)
        calls = []
        for n in range(SLOW):
            request = build_request([n % 90, n // 90], Sampling(max_tokens=LONG), request_id=f"slow-{n}")
            calls.append(stub.Generate(request))
        jobs = [worker.held for worker in workers]

        def all_pause() -> bool:
            held = [job for worker in jobs for job in worker.values()]
            return len(held) == SLOW and all(job.window <= 0 for job in held)

        await until(all_pause, "every slow stream has used up its window", 60.0)
        answers = await asyncio.gather(
            *(cluster.client.complete([n, n], Sampling(max_tokens=MANY)) for n in range(FAST))
        )
        assert [a.token_ids for a in answers] == [
            tuple(token_of((n, n), index) for index in range(MANY)) for n in range(FAST)
        ]
        # Nobody has made tokens ahead for those that do not read, and none of them was ended.
        assert dispatcher.running == sum(map(len, jobs)) == SLOW
        taken = {active.tracker.request_id: active.tracker._taken for active in dispatcher._active.values()}
        made = {name: produced[name] for name in taken}
        assert all(made[name] - taken[name] <= WINDOW for name in taken), "the window bounds what is on its way"
        assert max(taken.values()) < MANY, "what the transport has taken in place of the clients"
        assert 0 < buffered(dispatcher) <= SLOW * WINDOW
        # One of them reads again: it goes on where it was, to its end.
        tokens: list[int] = []
        async for event in calls[17]:
            assert isinstance(event, generation_pb2.GenerateEvent)
            tokens.extend(event.token_ids)
        assert tokens == [token_of((17, 0), index) for index in range(LONG)]
        for call in calls:
            call.cancel()
        await cluster.empty()
        await until(lambda: dispatcher.running == 0, "the router has forgotten all of them")


async def test_slow_clients_keep_no_place_on_a_worker(model: Path) -> None:
    worker = NullWorker("d0", Role.AGGREGATED, stall_s=0.05)
    async with (
        NullCluster(model, [worker], token_window=4, max_running_per_worker=2) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=SLOW_OPTIONS) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        calls = [stub.Generate(build_request([1, n], Sampling(max_tokens=LONG))) for n in range(12)]
        await until(lambda: len(worker.held) == 12, "all of them have been started, two at a time")
        assert (await cluster.client.complete([3], Sampling(max_tokens=5))).finish_reason == "length"
        for call in calls:
            call.cancel()
        await cluster.empty()


async def test_slow_clients_keep_memory_only_as_long_as_nobody_wants_it(model: Path) -> None:
    """Their blocks count as free: a request that needs them is sent, not kept waiting."""
    done = asyncio.Event()

    async def hold(point: str, key: object, index: int) -> None:
        if point == "token" and key.request_id == "running" and index == 2:  # type: ignore[attr-defined]
            await done.wait()

    worker = NullWorker("d0", Role.AGGREGATED, stall_s=0.05, num_blocks=10, hook=hold)
    async with (
        NullCluster(model, [worker], token_window=4) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=SLOW_OPTIONS) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        slow = stub.Generate(build_request([1] * 120, Sampling(max_tokens=38), request_id="slow"))
        await until(lambda: any(job.window <= 0 for job in worker.held.values()), "it is paused")
        running = asyncio.ensure_future(cluster.client.complete([2], Sampling(max_tokens=5), request_id="running"))
        await until(lambda: len(worker.held) == 2, "one runs beside it")
        answer = asyncio.ensure_future(cluster.client.complete([3] * 100, Sampling(max_tokens=5)))
        await until(answer.done, "it is not kept waiting")
        done.set()
        assert (await answer).finish_reason == (await running).finish_reason == "length"
        slow.cancel()
        await cluster.empty()
