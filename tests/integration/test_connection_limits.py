"""What one client may ask of a router's port, and all of them together."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import httpx
import pytest

from pdcore.config import RouterConfig
from pdcore.errors import InvalidRequest
from protos import generation_pb2, generation_pb2_grpc
from router import json_size, tensors
from router.client import AsyncClient, Sampling
from router.openai import connection, exchange
from router.openai import handshakes as handshakes_of_http
from router.openai.plan import MAX_COPIED_BYTES
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.processes import REPOSITORY
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
            assert await client.detokenize([1] * 25)
            with pytest.raises(InvalidRequest, match="the 100 that this cluster takes") as invalid:
                await client.detokenize([1] * 26)
            assert invalid.value.field == "token_ids"


async def test_what_is_said_of_http_connections_is_so(model: Path) -> None:
    """The other tests run with shorter times; this one holds the real ones to the documents."""
    said = " ".join((REPOSITORY / "docs" / "openai.md").read_text().split())
    (head_kib,) = re.findall(r"heads (\d+) KiB", said)
    (head,) = re.findall(r"head must come within (\d+) s", said)
    (body,) = re.findall(r"body without a pause of (\d+) s", said)
    (idle,) = re.findall(r"An idle connection ends after (\d+) s", said)
    (handshake,) = re.findall(r"must be encrypted within (\d+) s", said)
    (handshakes,) = re.findall(r"While (\d+) are not yet", said)
    assert int(head_kib) << 10 == connection.MAX_HEAD_BYTES
    assert (int(head), int(body)) == (connection.HEAD_S, exchange.BODY_S)
    assert (int(handshake), int(handshakes)) == (handshakes_of_http.HANDSHAKE_S, handshakes_of_http.MAX_HANDSHAKES)
    assert "once it has had half a second" in said
    assert handshakes_of_http.LEAST_S == 0.5
    async with NullCluster(model, [], http_port=0) as cluster:
        made = cluster.router._http._server.config  # type: ignore[union-attr]
    assert made.timeout_keep_alive == int(idle)


def test_what_is_said_of_limits_is_so() -> None:
    text = (REPOSITORY / "docs" / "security.md").read_text()
    table = text.partition("\n## Limits\n")[2].partition("\n## ")[0].replace(",", "")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    said = {key.strip("`").removeprefix("router."): [default, beyond] for key, default, beyond in rows[1:]}
    unit = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    ours = RouterConfig("r", "/model", "m", "127.0.0.1:1")
    keys = {key for key in said if hasattr(ours, key)}
    assert keys >= {"max_message_bytes", "max_prompt_bytes", "max_metadata_bytes", "max_streams_per_connection"}
    assert keys >= {"max_connections", "max_calls"}
    for key in keys:
        (number, of) = re.findall(r"^(\d+) ?(KiB|MiB|)", said[key][0])[0]
        assert getattr(ours, key) == int(number) * unit[of], key
    (of_headers,) = re.findall(r"of HTTP's headers (\d+) KiB 431", said["max_metadata_bytes"][1])
    assert int(of_headers) << 10 == connection.MAX_HEAD_BYTES

    def numbers(start: str) -> list[int]:
        (default,) = (default for key, (default, _) in said.items() if key.startswith(start))
        return [int(number) for number in re.findall(r"\d+", default)]

    assert numbers("of JSON in a request") == [json_size.MAX_PARTS, json_size.MAX_VALUES]
    assert numbers("of tensors") == [tensors.MAX_TENSORS, tensors.MAX_DIMENSIONS, tensors.MAX_ELEMENTS]
    assert numbers("of what several prompts")[0] << 20 == MAX_COPIED_BYTES
    assert numbers("of TLS handshakes") == [handshakes_of_http.HANDSHAKE_S, handshakes_of_http.MAX_HANDSHAKES]
