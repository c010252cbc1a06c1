"""Connections to a router: who pings as it likes, who vanishes, who watches its health, and how it goes away."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pdcore.config import RouterConfig
from pdcore.config_json import to_json
from pdcore.errors import Draining
from pdcore.types import Role
from protos import generation_pb2_grpc
from router import channels, service
from router.arrivals import Arrivals
from router.client import AsyncClient, Sampling, build_request
from router.openai.handshakes import HANDSHAKE_S
from tests.integration.test_router_flow import Gate, expected
from tests.support.http2 import Http2Connection
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.processes import REPOSITORY, RUN_MODULE
from tests.support.router_fleet import RouterFleet
from tests.support.tiny_model import tiny_llama

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


# -- keepalive ------------------------------------------------------------------------------------------------------


async def test_a_client_that_pings_all_the_time_is_not_sent_away(model: Path) -> None:
    """With gRPC's own settings the third ping within five minutes is answered with GOAWAY."""
    async with NullCluster(model, pair()) as cluster, Http2Connection(cluster.router.address) as connection:
        for number in range(100):
            connection.ping()
            await until(lambda number=number: connection.pongs > number, "an answer")  # type: ignore[misc]
        gate = cluster["d0"].hook = Gate("token", index=2)
        message = build_request([1], Sampling(max_tokens=4), request_id="r").SerializeToString()
        connection.call(1, "/pdserve.v1.Generation/Generate", message)
        await gate.reached.wait()
        for _ in range(100):
            connection.ping()
        await until(lambda: connection.pongs == 200, "answers while a stream runs")
        gate.opened.set()
        await until(lambda: any(b"grpc-status" in frame.payload for frame in connection.frames), "the stream ends")
        assert (connection.goaway, connection.ended) == (None, False)


async def test_an_idle_client_stays_and_one_that_vanished_is_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {
        "grpc.keepalive_time_ms": 100,
        "grpc.keepalive_timeout_ms": 300,
        "grpc.http2.ping_timeout_ms": 300,
    }
    options = [(name, quick.get(name, value)) for name, value in channels._PUBLIC_KEEPALIVE]
    assert {name for name, _ in options} >= set(quick)
    monkeypatch.setattr(channels, "_PUBLIC_KEEPALIVE", tuple(options))
    async with (
        NullCluster(model, pair()) as cluster,
        Http2Connection(cluster.router.address) as idle,
        Http2Connection(cluster.router.address, polite=False) as gone,
    ):
        gate = cluster["d0"].hook = Gate("token", index=2)
        message = build_request([1], Sampling(max_tokens=4), request_id="r").SerializeToString()
        gone.call(1, "/pdserve.v1.Generation/Generate", message)
        await gate.reached.wait()
        await until(lambda: cluster["d0"].commands["abort", "r"] == 1, "its work is freed")
        await cluster.empty()
        await until(lambda: idle.pinged >= 5, "the idle one is asked whether it is there")
        assert (idle.goaway, idle.ended) == (None, False)


async def test_what_is_said_of_connections_is_what_servers_are_made_with(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests run with shorter times; this one holds the real ones to the documents."""
    made: list[dict[str, int]] = []
    make = grpc.aio.server

    def server(*arguments: Any, options: Sequence[tuple[str, int]] = (), **named: Any) -> grpc.aio.Server:
        made.append(dict(options))
        assert len(made[-1]) == len(options), "each once"
        return make(*arguments, options=options, **named)

    with monkeypatch.context() as patch:
        patch.setattr(grpc.aio, "server", server)
        async with NullCluster(model, []) as cluster:
            config = cluster.router.config
    (options,) = (each for each in made if "grpc.max_allowed_incoming_connections" in each)
    said = " ".join((REPOSITORY / "docs" / "grpc.md").read_text().split())
    (every, within) = re.findall(r"Every (\d+) s without news .* without an answer for (\d+) s the connection", said)[
        0
    ]
    (handshake,) = re.findall(r"must be encrypted within (\d+) s", said)
    assert options["grpc.keepalive_time_ms"] == 1000 * int(every)
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 1000 * int(within)
    assert options["grpc.server_handshake_timeout_ms"] == 1000 * int(handshake) == 1000 * HANDSHAKE_S
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert (options["grpc.http2.max_ping_strikes"], options["grpc.http2.max_pings_without_data"]) == (0, 0)
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] == 0
    # Whatever else would send somebody away who is idle, or has been there for days, is left as it is: off.
    assert not [name for name in options if "idle" in name or "connection_age" in name]
    limits = {
        "grpc.max_receive_message_length": config.max_message_bytes,
        "grpc.max_send_message_length": config.max_message_bytes,
        "grpc.max_metadata_size": config.max_metadata_bytes,
        "grpc.absolute_max_metadata_size": config.max_metadata_bytes,
        "grpc.max_concurrent_streams": config.max_streams_per_connection,
        "grpc.max_allowed_incoming_connections": config.max_connections,
    }
    assert options | limits == options
    # Clients of ours ask while something runs, and seldom.
    ours = dict(channels.client_options(1, 1))
    assert "grpc.keepalive_permit_without_calls" not in ours
    assert ours["grpc.keepalive_time_ms"] >= 60_000


# -- health ---------------------------------------------------------------------------------------------------------


async def check(address: str, name: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
        return int(reply.status)


async def test_health_of_each_pool_follows_its_workers(model: Path) -> None:
    async with (
        NullCluster(model, []) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        stub, names = health_pb2_grpc.HealthStub(channel), ("", "pool/prefill", "pool/decode", "pool/aggregated")
        watches = {name: stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names}
        assert [(await watch.read()).status for watch in watches.values()] == [NOT_SERVING] * 4
        assert await check(cluster.router.address, "pdserve.v1.Admin") == SERVING  # it answers without workers, too
        for worker in pair():
            await cluster.replace(worker)
        for name in ("", "pool/prefill", "pool/decode"):
            assert (await watches[name].read()).status == SERVING
        await cluster["p0"].crash()
        assert (await watches["pool/prefill"].read()).status == NOT_SERVING
        assert await check(cluster.router.address, "") == SERVING  # served degraded
        await cluster.replace(NullWorker("a0", Role.AGGREGATED))
        assert (await watches["pool/aggregated"].read()).status == SERVING
        cluster["d0"].draining = True
        assert (await watches["pool/decode"].read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="'pool/decode'") as unknown:
            await check(cluster.router.address, "pool/of-tears")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.Watch(health_pb2.HealthCheckRequest(service="x")).read()).status == SERVICE_UNKNOWN


async def test_watchers_do_not_depend_on_each_other(model: Path) -> None:
    async with (
        NullCluster(model, []) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
        Http2Connection(cluster.router.address, polite=False) as deaf,
    ):
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="pool/decode")
        leaving, staying = stub.Watch(request), stub.Watch(request)
        assert [(await watch.read()).status for watch in (leaving, staying)] == [NOT_SERVING] * 2
        deaf.call(1, "/grpc.health.v1.Health/Watch", request.SerializeToString())
        await until(lambda: cluster.router._health.watchers == 3, "all watch")
        leaving.cancel()
        await until(lambda: cluster.router._health.watchers == 2, "one has left")
        await cluster.replace(NullWorker("d0", Role.DECODE))
        assert (await staying.read()).status == SERVING


async def test_reflection_in_both_versions_describes_calls_and_errors(model: Path) -> None:
    async with NullCluster(model, []) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        for version in ("v1", "v1alpha"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = [entry.name for entry in (await call.read()).list_services_response.service]
            assert listed == sorted(listed)
            assert {"pdserve.v1.Generation", "grpc.reflection.v1.ServerReflection"} <= set(listed)
            for symbol in (*listed, "google.rpc.ErrorInfo", "google.rpc.BadRequest"):
                await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
                assert (await call.read()).file_descriptor_response.file_descriptor_proto, symbol
            call.cancel()


# -- going away -----------------------------------------------------------------------------------------------------


async def test_a_server_is_quiet_when_no_call_has_come_for_a_while() -> None:
    arrivals = Arrivals()
    await arrivals.quiet(0.01, 5.0)  # none at all

    async def come() -> None:
        while True:
            arrivals.note()
            await asyncio.sleep(0.01)

    coming = asyncio.create_task(come())
    waiting = asyncio.create_task(arrivals.quiet(0.2, 60.0))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await arrivals.quiet(0.2, 0.05)  # its bound
    coming.cancel()
    await waiting


async def test_draining_it_refuses_then_sends_goaway_and_streams_finish(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "QUIET_S", 60.0)
    monkeypatch.setattr(service, "MAX_NOTICE_S", 3.0)
    async with (
        NullCluster(model, pair()) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
        Http2Connection(cluster.router.address) as other,
    ):
        gate = cluster["d0"].hook = Gate("token", index=2)
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = stub.Generate(build_request([1], Sampling(max_tokens=6)))
        await gate.reached.wait()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        draining = asyncio.ensure_future(cluster.router.drain(30.0))
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE  # it ends, and holds nothing up
        with pytest.raises(Draining) as refused:
            await cluster.client.complete([1])
        assert refused.value.retry_after_s
        await until(lambda: other.goaway is not None, "connections are told")
        await until(lambda: other.ended, "and end, where nothing runs")
        with pytest.raises(grpc.aio.AioRpcError) as closed:
            await stub.Generate(build_request([1]), wait_for_ready=False).read()
        assert closed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        gate.opened.set()
        tokens = [token async for event in running for token in event.token_ids]
        assert tuple(tokens) == expected([1], 6)
        assert await draining is True
        await cluster.empty()


@asynccontextmanager
async def router_process(config: RouterConfig, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router of its own, and its address."""
    path = folder / f"{config.router_id}.json"
    path.write_text(to_json(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN_MODULE, "router", str(path)), stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60.0)
        assert line.startswith(b"READY "), line
        yield process, json.loads(line.removeprefix(b"READY "))["address"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_router_that_is_told_to_end_loses_no_stream_and_no_call(model: Path, tmp_path: Path) -> None:
    """Under load, since what is lost is what is on its way when the server stops."""
    worker = NullWorker("aggregated-0", Role.AGGREGATED, step_s=0.01)
    async with (
        RouterFleet(model, [worker], count=0) as fleet,
        router_process(fleet.router_config(0), tmp_path) as (leaving, one),
        router_process(fleet.router_config(1), tmp_path) as (_, two),
        AsyncClient([one, two]) as client,
        grpc.aio.insecure_channel(one) as channel,
    ):
        await until(lambda: worker.sessions == 2, "sessions of both routers")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != SERVING:
            pass
        ended, calls = asyncio.Event(), 0

        async def call_all_the_time() -> None:
            nonlocal calls
            while not ended.is_set():
                calls += 1
                await client.complete([7], Sampling(max_tokens=2))

        streams = [client.generate([n], Sampling(max_tokens=100)) for n in range(8)]
        first = [await anext(stream) for stream in streams]

        async def ask_all_the_time() -> None:  # cheap, so that many are on their way at each moment
            while not ended.is_set():
                await client.tokenize("hi")

        load = [asyncio.create_task(call_all_the_time()) for _ in range(4)]
        load += [asyncio.create_task(ask_all_the_time()) for _ in range(30)]
        await until(lambda: calls > 20, "load")
        leaving.terminate()
        assert (await watch.read()).status == NOT_SERVING
        answers = await asyncio.gather(*(stream.collect() for stream in streams))
        assert [answer.token_ids for answer in answers] == [expected([n], 100) for n in range(8)]
        assert all(event.token_ids for event in first)
        assert await asyncio.wait_for(leaving.wait(), 30.0) == 0
        before = calls
        await until(lambda: calls > before + 10, "the other serves on")
        ended.set()
        await asyncio.gather(*load)
