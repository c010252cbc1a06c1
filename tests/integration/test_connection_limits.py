"""What one client may ask of a router's port, and all of them together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest

from pdcore.errors import InvalidRequest
from protos import generation_pb2, generation_pb2_grpc
from router.client import AsyncClient, Sampling
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.tiny_model import tiny_llama

ALONE = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def waiting(channel: grpc.aio.Channel, number: int) -> grpc.aio.UnaryStreamCall:
    """A request that runs for as long as the test likes."""
    request = generation_pb2.GenerateRequest(request_id=f"r{number}", prompt="x")
    request.sampling.max_tokens = 4000
    return generation_pb2_grpc.GenerationStub(channel).Generate(request)


async def test_calls_beyond_the_limit_are_refused(model: Path) -> None:
    async with (
        NullCluster(model, pair(step_s=0.05), max_calls=3) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        calls = [waiting(channel, number) for number in range(3)]
        for call in calls:
            await call.read()
        refused = waiting(channel, 3)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        await until(lambda: cluster.dispatcher.running == 2, "one has ended")
        await asyncio.sleep(0.1)  # and its call
        again = waiting(channel, 4)
        assert await again.read() is not grpc.aio.EOF
        for call in (*calls, again):
            call.cancel()


async def test_streams_of_a_connection_wait_and_connections_are_bounded(model: Path) -> None:
    limits = {"max_streams_per_connection": 2, "max_connections": 2, "http_port": 0}
    async with NullCluster(model, pair(step_s=0.05), **limits) as cluster:
        async with (
            grpc.aio.insecure_channel(cluster.router.address, options=ALONE) as first,
            grpc.aio.insecure_channel(cluster.router.address, options=ALONE) as second,
            grpc.aio.insecure_channel(cluster.router.address, options=ALONE) as third,
        ):
            calls = [waiting(first, 0), waiting(first, 1)]
            for call in calls:
                await call.read()
            held = waiting(first, 2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await held.read()
            other = waiting(second, 3)
            assert await other.read() is not grpc.aio.EOF
            assert await waiting(third, 4).code() is grpc.StatusCode.UNAVAILABLE
            for call in (*calls, other):
                call.cancel()
        url = f"http://{cluster.router.http_address}/health"
        async with httpx.AsyncClient() as a, httpx.AsyncClient() as b, httpx.AsyncClient() as c:
            assert [(await client.get(url)).status_code for client in (a, b, c)] == [200, 200, 503]


async def test_headers_and_prompts_have_a_largest_size(model: Path) -> None:
    async with NullCluster(model, pair(), max_metadata_bytes=4096, max_prompt_bytes=100) as cluster:
        async with grpc.aio.insecure_channel(cluster.router.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.GetModelRequest()
            await stub.GetModel(request, metadata=(("x-some", "y" * 2000),))
            for _ in range(5):  # not at random, between a soft limit and a hard one
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.GetModel(request, metadata=(("x-some", "y" * 4096),))
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "yyy" not in str(refused.value.details())
        async with AsyncClient(cluster.router.address) as client:
            await client.complete("x" * 100, Sampling(max_tokens=1))
            await client.complete([1] * 25, Sampling(max_tokens=1))
            for prompt, field in (
                ("x" * 101, "prompt"),
                ("ä" * 51, "prompt"),
                ([1] * 26, "token_ids"),
                ([{"role": "user", "content": "x" * 100}], "chat"),
            ):
                with pytest.raises(InvalidRequest, match="the 100 that this cluster takes") as invalid:
                    await client.complete(prompt, Sampling(max_tokens=1))
                assert invalid.value.field == field
            with pytest.raises(InvalidRequest, match="the 100 that this cluster takes"):
                await client.tokenize("x" * 101)
