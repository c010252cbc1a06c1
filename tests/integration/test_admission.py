"""Keys, limits, shedding and gaps through a real router, over real gRPC, with null workers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdcore.api_key import key_metadata
from pdcore.classes import ClassObjective, ClassObjectives, TenantLimits
from pdcore.errors import ConfigError, DeadlineExceeded, InvalidRequest, Overloaded, RateLimited, Unauthenticated
from pdcore.step_time import MIN_STEPS, StepTime
from pdcore.types import PriorityClass, RequestKey, Role
from protos import admin_pb2, admin_pb2_grpc, worker_pb2
from protos.convert import step_time_to_proto
from router.client import AsyncClient, Sampling
from router.shedding import Pace
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.tiny_model import tiny_llama

KEYS = {"key-of-acme": "acme", "key-of-globex": "globex", "key-of-ops": "{tenant: ops, admin: true}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


class Gate:
    """A hook that holds requests at one point until it is opened, and notes who came there."""

    def __init__(self, point: str) -> None:
        self.opened = asyncio.Event()
        self.order: list[str] = []
        self._point = point

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if point == self._point:
            self.order.append(key.request_id)
            await self.opened.wait()


class Measured(NullWorker):
    """Reports step times, and prompt tokens that others have queued there."""

    step_time = StepTime(token_ms=10.0, steps=MIN_STEPS)
    others_queued = 0

    def _load(self) -> worker_pb2.Load:
        load = super()._load()
        load.step_time.CopyFrom(step_time_to_proto(self.step_time))
        load.queued_prefill_tokens += self.others_queued
        return load


def measured() -> list[NullWorker]:
    return [Measured("p0", Role.PREFILL), Measured("d0", Role.DECODE)]


def running(cluster: NullCluster, tenant: str) -> int:
    return cluster.dispatcher.admission.tenants.running(tenant)


async def classes(cluster: NullCluster, key: str = "") -> dict[str, admin_pb2.ClassStatus]:
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=key_metadata(key))
    return {entry.name: entry for entry in status.classes}


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()}: {name}\n" for key, name in KEYS.items()))
    return str(path)


async def test_with_keys_every_public_call_needs_one(
    model: Path, key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with NullCluster(model, pair(), api_keys_file=key_file) as cluster:
        for key in ("", "key-of-nobody"):
            async with AsyncClient(cluster.router.address, api_key=key) as stranger:
                for call in (
                    stranger.complete([1], Sampling(max_tokens=1)),
                    stranger.cancel("any"),
                    stranger.model(),
                    stranger.tokenize("x"),
                    stranger.detokenize([1]),
                ):
                    with pytest.raises(Unauthenticated):
                        await call
        assert not any(worker.commands for worker in cluster.workers.values())
        async with AsyncClient(cluster.router.address, api_key="key-of-acme") as acme:
            assert (await acme.complete([1], Sampling(max_tokens=1), tenant="acme")).token_ids
            assert (await acme.model()).model.name == "null"
            with pytest.raises(InvalidRequest) as refused:
                await acme.complete([1], tenant="globex")
            assert refused.value.field == "tenant"
        async with grpc.aio.insecure_channel(cluster.router.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]))
            assert (await anext(aiter(call))).list_services_response.service
            # What an operator asks is for operators, above all what makes calls to every worker.
            admin = admin_pb2_grpc.AdminStub(channel)
            for key in ("", "key-of-nobody", "key-of-acme"):
                for method, message in (
                    (admin.GetStatus, admin_pb2.GetStatusRequest()),
                    (admin.GetSteps, worker_pb2.GetStepsRequest(count=1)),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as closed:
                        await method(message, metadata=key_metadata(key))
                    assert closed.value.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert ("admin: true" in closed.value.details()) == (key == "key-of-acme")
        assert await classes(cluster, "key-of-ops")
        async with AsyncClient(cluster.router.address, api_key="key-of-ops") as operator:
            assert (await operator.complete([1], Sampling(max_tokens=1), tenant="ops")).token_ids
    shown = "\n".join([caplog.text, *(str(record.__dict__) for record in caplog.records)])
    assert "acme" in shown, "tenants are logged"
    assert "key-of" not in shown


async def test_the_key_says_whose_it_is_and_nobody_cancels_for_others(model: Path, key_file: str) -> None:
    tenants = (TenantLimits("acme", default_class=PriorityClass.BATCH),)
    async with (
        NullCluster(model, pair(), api_keys_file=key_file, tenants=tenants) as cluster,
        AsyncClient(cluster.router.address, api_key="key-of-acme") as acme,
        AsyncClient(cluster.router.address, api_key="key-of-globex") as globex,
    ):
        heard: list[tuple[str, int]] = []
        cluster["d0"].refuse = lambda command, request: heard.append((request.tenant, request.request_class))  # type: ignore[func-returns-value]
        gate = cluster["p0"].hook = Gate("prefill")
        mine = asyncio.ensure_future(acme.complete([1], Sampling(max_tokens=2), request_id="mine"))
        several = asyncio.ensure_future(acme.samples([1], Sampling(max_tokens=2, n=2), request_id="several"))
        await until(lambda: len(gate.order) == 2, "both run")
        assert not await globex.cancel("mine")
        assert not await globex.cancel("several")
        gate.opened.set()
        assert (await mine).finish_reason == "length"
        assert [answer.finish_reason for answer in await several] == ["length"] * 2
        gate.opened.clear()
        again = asyncio.ensure_future(acme.complete([1], Sampling(max_tokens=2), request_id="again"))
        await until(lambda: "again" in gate.order, "it runs")
        assert await acme.cancel("again")
        assert (await again).finish_reason == "cancelled"
        gate.opened.set()
        await globex.complete([1], Sampling(max_tokens=1))
        assert heard[0] == ("acme", worker_pb2.REQUEST_CLASS_BATCH)
        assert heard[-1] == ("globex", worker_pb2.REQUEST_CLASS_STANDARD)


async def test_a_key_file_that_is_none_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("key-of-acme: acme\n")
    cluster = NullCluster(model, pair(), api_keys_file=str(path))
    with pytest.raises(ConfigError, match="SHA-256") as refused:
        await cluster.__aenter__()
    assert "key-of-acme" not in str(refused.value)
    for worker in cluster.workers.values():
        await worker.stop()
    await cluster.membership.stop()


# -- limits ---------------------------------------------------------------------------------------------------------


async def test_places_come_back_once_however_a_request_ends(model: Path) -> None:
    limits = (TenantLimits("*", max_concurrent=1),)
    async with NullCluster(model, pair(), tenants=limits) as cluster:
        client, gate = cluster.client, Gate("prefill")
        cluster["p0"].hook = gate

        async def holds(tenant: str, **options: object) -> asyncio.Task[object]:
            task = asyncio.ensure_future(client.samples([1], tenant=tenant, request_id=tenant, **options))  # type: ignore[arg-type]
            await until(lambda: tenant in gate.order, "it runs")
            with pytest.raises(Overloaded, match="1 requests at a time") as refused:
                await client.complete([1], tenant=tenant)
            assert refused.value.retry_after_s > 0
            assert (type(refused.value), refused.value.reason) == (RateLimited, "RATE_LIMITED")
            assert refused.value.facts == {"tenant": tenant, "limit": "1 requests at a time"}
            assert running(cluster, tenant) == 1
            return task  # type: ignore[return-value]

        cancelled = await holds("cancelled")
        assert await client.cancel("cancelled")
        await cancelled
        late = await holds("late", timeout_s=0.3)
        with pytest.raises(DeadlineExceeded):
            await late
        gone = await holds("gone")
        gone.cancel()
        several = await holds("several", sampling=Sampling(n=3, max_tokens=2))
        assert await client.cancel("several")
        await several
        await until(lambda: all(running(cluster, name) == 0 for name in gate.order), "all have given back")
        finished = await holds("finished", sampling=Sampling(max_tokens=2, n=2))
        gate.opened.set()
        await finished
        broken = cluster["d0"]
        broken.refuse = lambda command, request: worker_pb2.FAILURE_CODE_INVALID
        with pytest.raises(InvalidRequest):
            await client.complete([1], tenant="finished")
        broken.refuse = None
        await until(lambda: running(cluster, "finished") == 0, "all have given back")
        assert cluster.dispatcher.admission.rate_limited == 5
        await cluster.empty()


async def test_tokens_a_minute_are_prompt_and_output_and_what_is_not_used_comes_back(model: Path) -> None:
    limits = (TenantLimits("acme", tokens_per_minute=1000),)
    async with NullCluster(model, pair(), tenants=limits) as cluster:
        gate = cluster["p0"].hook = Gate("prefill")
        tenants, clock = cluster.dispatcher.admission.tenants, cluster.router._clock
        asked = asyncio.ensure_future(
            cluster.client.samples([1] * 100, Sampling(max_tokens=450, n=2), tenant="acme", request_id="r")
        )
        await until(lambda: gate.order == ["r"], "it runs")
        with pytest.raises(Overloaded, match="1000 tokens a minute"):
            await cluster.client.complete([1] * 100, Sampling(max_tokens=10), tenant="acme")
        await cluster.client.cancel("r")
        await asked
        # The prompt was in work, so that it counts; of the output there was none.
        assert tenants.over_limit("acme", 900, clock.now()) is None
        charged = asyncio.ensure_future(cluster.client.complete([1] * 100, Sampling(max_tokens=800), tenant="acme"))
        await until(lambda: len(gate.order) == 2, "it runs")
        assert tenants.over_limit("acme", 100, clock.now()) is not None
        charged.cancel()


# -- shedding -------------------------------------------------------------------------------------------------------

URGENT = ClassObjectives(interactive=ClassObjective(ttft_ms=500.0), standard=ClassObjective())


async def test_what_cannot_be_in_time_is_shed_before_anything_is_computed(model: Path) -> None:
    """A token takes 10 ms, so a prompt of 100 takes a second, and one runs at a time."""
    async with NullCluster(model, measured(), classes=URGENT, max_queued_prefill_tokens=1) as cluster:
        client, gate = cluster.client, Gate("prefill")
        cluster["p0"].hook = gate
        await until(lambda: cluster.dispatcher.pool.snapshot("p0").load.step_time.known, "it has reported")
        short = Sampling(max_tokens=2)
        # Late by itself, but nobody is before it.
        first = asyncio.ensure_future(client.complete([1] * 100, short, priority="interactive", request_id="first"))
        await until(lambda: gate.order == ["first"], "it runs")
        with pytest.raises(Overloaded, match=r"after 2\d\d\d ms, 80% of the class's objective allows 1600") as shed:
            await client.complete([2] * 100, short, priority="interactive", request_id="late")
        assert 0.5 <= shed.value.retry_after_s < 1
        waits = asyncio.ensure_future(client.complete([3] * 100, short, request_id="waits"))
        await until(lambda: cluster.dispatcher.queued == 1, "a standard one has no objective and waits")
        with pytest.raises(Overloaded, match="the deadline allows") as shed:
            await client.complete([4] * 100, short, timeout_s=0.9, request_id="hurried", priority="batch")
        assert shed.value.retry_after_s > 1, "two are before it"
        gate.opened.set()
        assert (await first).finish_reason == (await waits).finish_reason == "length"
        assert not any(name in ("late", "hurried") for w in cluster.workers.values() for _, name in w.commands)
        found = await classes(cluster)
        assert (found["interactive"].shed_late, found["batch"].shed_late, found["standard"].shed_late) == (1, 1, 0)
        assert (found["interactive"].admitted, found["interactive"].finished) == (1, 1)
        assert found["interactive"].ttft_ms == 500


async def test_what_waits_is_given_up_when_it_cannot_be_in_time_any_more(model: Path) -> None:
    async with NullCluster(
        model,
        measured(),
        classes=URGENT,
        max_queued_prefill_tokens=1,
        tenants=(TenantLimits("*", max_concurrent=9, requests_per_minute=3),),
    ) as cluster:
        client, gate = cluster.client, Gate("prefill")
        cluster["p0"].hook = gate
        await until(lambda: cluster.dispatcher.pool.snapshot("p0").load.step_time.known, "it has reported")
        first = asyncio.ensure_future(client.complete([1] * 10, Sampling(max_tokens=2), request_id="first"))
        await until(lambda: gate.order == ["first"], "it runs")
        waits = asyncio.ensure_future(
            client.samples([2] * 10, Sampling(max_tokens=2, n=2), priority="interactive", request_id="waits")
        )
        patient = asyncio.ensure_future(client.complete([3] * 10, Sampling(max_tokens=2), request_id="patient"))
        await until(lambda: cluster.dispatcher.queued == 2, "they wait")
        cluster["p0"].others_queued = 100_000  # type: ignore[attr-defined]
        with pytest.raises(Overloaded, match="95% of the class's objective allows 475"):
            await waits
        assert running(cluster, "") == 2, "the samples that were given up hold nothing"
        tenants, clock = cluster.dispatcher.admission.tenants, cluster.router._clock
        assert tenants.over_limit("", 1, clock.now()) is None, "what is shed costs nothing"
        assert (await classes(cluster))["interactive"].shed_waiting == 1
        cluster["p0"].others_queued = 0  # type: ignore[attr-defined]
        gate.opened.set()
        assert (await first).finish_reason == (await patient).finish_reason == "length"


async def test_predictions_learn_from_first_tokens(model: Path) -> None:
    """The workers say that prompts take forever, and answer at once: the pace goes down."""
    async with NullCluster(model, measured(), classes=URGENT) as cluster:
        await until(lambda: cluster.dispatcher.pool.snapshot("p0").load.step_time.known, "it has reported")
        pace: Pace = cluster.dispatcher.admission._pace
        for _ in range(3):
            await cluster.client.complete([1] * 200, Sampling(max_tokens=2))
        assert pace.factor < 0.5


# -- gaps -----------------------------------------------------------------------------------------------------------


async def test_batch_waits_where_it_would_break_the_pace_of_others(model: Path) -> None:
    """A step of n requests takes 10 n ms: with two the interactive one would see more than its 15."""
    paced = ClassObjectives(interactive=ClassObjective(itl_ms=15.0), standard=ClassObjective())
    async with NullCluster(model, measured(), classes=paced) as cluster:
        client = cluster.client
        await until(lambda: cluster.dispatcher.pool.snapshot("d0").load.step_time.known, "it has reported")
        gate = cluster["d0"].hook = Gate("token")
        urgent = client.generate([1], Sampling(max_tokens=3), priority="interactive", request_id="urgent")
        async with aclosing(urgent) as events:
            await anext(events)
            batch = asyncio.ensure_future(
                client.complete([1], Sampling(max_tokens=3), priority="batch", request_id="batch")
            )
            await until(lambda: cluster.dispatcher.queued == 1, "it waits")
            other = asyncio.ensure_future(client.complete([1], Sampling(max_tokens=3), request_id="standard"))
            await until(lambda: "standard" in gate.order, "others are not held back")
            assert cluster.dispatcher.queued == 1
            assert (await classes(cluster))["batch"].waiting == 1
            gate.opened.set()
        assert (await other).finish_reason == (await batch).finish_reason == "length"
        assert gate.order[-1] == "batch"


def test_rate_limited_is_a_kind_of_overloaded() -> None:
    assert issubclass(RateLimited, Overloaded), "so that it has the same status, and a hint"
