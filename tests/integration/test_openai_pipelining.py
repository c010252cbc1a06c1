"""Requests that are sent behind one that is still being answered, and clients of HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from tests.integration.test_openai_surface import ONE, answer, ask, post
from tests.integration.test_router_flow import Gate
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.tiny_model import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy.:DeprecationWarning")


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """What routers run on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[NullCluster]:
    async with NullCluster(model, pair(), http_port=0) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behind", [b"\r\nGET /hea", b"GET /health HTTP/1.1\r\n\r\n", post(b"x" * 20_000), post(b"x" * 200_000)]
)
async def test_a_client_that_goes_is_noticed_whatever_stands_behind_its_request(
    model: Path, caplog: pytest.LogCaptureFixture, stream: bool, behind: bytes
) -> None:
    async with NullCluster(model, pair(step_s=0.02), http_port=0, max_connections=1) as cluster:
        host, port = cluster.router.http_address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        writer.write(post(json.dumps(body).encode(), b""))
        await until(lambda: cluster.dispatcher.running == 1, "it runs")
        writer.write(behind)
        await asyncio.sleep(0.2)
        writer.transport.abort()
        await until(lambda: not cluster.dispatcher.running, "it was cancelled")
        await cluster.empty()
        assert answer(await ask(cluster, post(ONE)))[0] == 200, "its connection counts no more"
    assert "send() raised" not in caplog.text
    assert "ASGI" not in caplog.text


async def test_too_much_behind_a_request_is_not_answered(model: Path) -> None:
    gate = Gate("token", index=1)
    workers = pair()
    workers[1].hook = gate
    async with NullCluster(model, workers, http_port=0) as cluster:
        ping = b"GET /version HTTP/1.1\r\nhost: x\r\nx-a: %s\r\n\r\n" % (b"a" * 1000)
        for behind, responses in ((20 * ping, 22), (100 * ping, 1)):
            gate.opened.clear()
            gate.reached.clear()
            end = b"GET /version HTTP/1.0\r\n\r\n"
            asking = asyncio.ensure_future(ask(cluster, post(b'{"prompt":"x","max_tokens":3}', b"") + behind + end))
            await gate.reached.wait()
            await asyncio.sleep(0.2)
            gate.opened.set()
            got = await asking
            assert got.count(b"HTTP/1.1 200 ") == responses
            assert got.count(b'"text_completion"') == 1


async def test_a_client_without_chunks_gets_none(cluster: NullCluster) -> None:
    for body in (ONE, ONE[:-1] + b',"stream":true}'):
        got = await ask(cluster, post(body, b"").replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, rest = got.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"\r\nconnection: close" in head
        assert rest.startswith(b"{") or (rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n"))
