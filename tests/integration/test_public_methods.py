"""What may be called without an API key, and how much of it, where there are keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from router.client import AsyncClient, Sampling
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.tiny_model import tiny_llama

PUBLIC = {
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
}
MAX_CALLS = 48
PLACES = 3  # of these for each public method
ENDLESS = sorted(name for name in PUBLIC if not name.endswith("/List"))  # which the router does not have


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path, tmp_path: Path) -> AsyncIterator[NullCluster]:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'right').hexdigest()}: acme\n")
    async with NullCluster(model, pair(), api_keys_file=str(keys), max_calls=MAX_CALLS) as cluster:
        yield cluster


def methods_of(address: str) -> set[str]:
    """All that the router has, by its own account."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in database.get_services()]
        return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


async def test_every_method_needs_a_key_but_those_that_are_public(cluster: NullCluster) -> None:
    methods = await asyncio.to_thread(methods_of, cluster.router.address)
    assert {"/inference.GRPCInferenceService/ModelConfig", "/pdserve.v1.Admin/GetStatus"} <= methods
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        let_in = set()
        for method in methods:
            call = channel.stream_stream(method)()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # refused before or after the message
                await call.write(b"")
                await call.read()
            if not call.done() or await call.code() is not grpc.StatusCode.UNAUTHENTICATED:
                let_in.add(method)
            call.cancel()
    assert let_in == PUBLIC & methods


async def test_callers_without_a_key_leave_room_for_those_with_one(cluster: NullCluster) -> None:
    """They took every call that there may be, by watching the health, or by sending nothing."""
    async with (
        grpc.aio.insecure_channel(cluster.router.address) as channel,
        AsyncClient(cluster.router.address, api_key="right") as client,
    ):
        calls = [channel.stream_stream(name)() for name in ENDLESS for _ in range(2 * PLACES)]
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch")
        refused = [call for call in calls if call.done()]

        def settled() -> bool:
            refused[:] = [call for call in calls if call.done()]
            return len(refused) == len(calls) - len(ENDLESS) * PLACES

        await until(settled, "those beyond the limit are refused")
        for call in refused:
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"{PLACES} calls of this method run" in await call.details()
        assert await watching(b"").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.complete("a", Sampling(max_tokens=2))).finish_reason == "length"
        for call in calls:
            call.cancel()
        health = HealthStub(channel)
        for _ in range(100):
            with suppress(grpc.aio.AioRpcError):
                assert (await health.Check(HealthCheckRequest())).status == HealthCheckResponse.SERVING
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("there is room again")


async def test_a_call_that_ends_without_its_message_is_the_client_s_mistake(cluster: NullCluster) -> None:
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        call = channel.stream_stream("/grpc.health.v1.Health/Check")()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        junk = channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff")
        assert await junk.code() is grpc.StatusCode.INVALID_ARGUMENT
