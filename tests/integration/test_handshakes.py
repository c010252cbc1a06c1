"""Who connects to a port with TLS, and says nothing."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import uvloop

from router import channels
from router.openai import handshakes
from tests.support.certificates import Authority
from tests.support.null_cluster import NullCluster, until
from tests.support.tiny_model import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy.:DeprecationWarning")


@pytest.fixture(params=[uvloop.EventLoopPolicy, asyncio.DefaultEventLoopPolicy], ids=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Routers run on the first; whoever has one within another program, on any."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def silent(address: str, writers: list[asyncio.StreamWriter]) -> asyncio.StreamReader:
    """A connection that says nothing, and stays for as long as its writer does."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writers.append(writer)
    return reader


async def test_silent_connections_are_bounded_and_keep_nobody_out(
    model: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each held a quarter of a megabyte for a minute, and there was no limit to how many."""
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(handshakes, "LEAST_S", 0.1)
    tls = authority.public()
    async with NullCluster(model, [], tls=tls, client_tls=authority.client(), http_port=0) as cluster:
        running = cluster.router._http._handshakes
        address = cluster.router.http_address
        writers: list[asyncio.StreamWriter] = []
        quiet = [await silent(address, writers) for _ in range(12)]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(running))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        context = ssl.create_default_context(cafile=authority.ca_file)
        async with httpx.AsyncClient(verify=context, timeout=30.0) as client:
            assert (await client.get(f"https://{address}/health")).status_code == 503  # there are no workers
            assert await asyncio.wait_for(quiet[0].read(), 30.0) == b""  # it had had its time
            await until(lambda: len(running) < 4, "a place is left for whoever comes")
            assert not quiet[-1].at_eof()
            assert (await client.get(f"https://{address}/health")).status_code == 503
        watching.cancel()
        assert most == 4
        for writer in writers:
            writer.close()


async def test_a_handshake_has_its_time(model: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.2)
    (name,) = (name for name, _ in channels._HANDSHAKE)
    monkeypatch.setattr(channels, "_HANDSHAKE", ((name, 200),))
    tls = authority.public()
    async with NullCluster(model, [], tls=tls, client_tls=authority.client(), http_port=0) as cluster:
        for address in (cluster.router.http_address, cluster.router.address):
            writers: list[asyncio.StreamWriter] = []
            reader = await silent(address, writers)
            assert await asyncio.wait_for(reader.read(), 30.0) == b""
            writers[0].close()
        assert len(cluster.router._http._handshakes) == 0


async def test_a_crowd_that_comes_at_once_is_let_in(
    model: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not accepted yet wait; nobody who talks is cut off for them."""
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(handshakes, "LEAST_S", 30.0)
    tls = authority.public()
    async with NullCluster(model, [], tls=tls, client_tls=authority.client(), http_port=0) as cluster:
        context = ssl.create_default_context(cafile=authority.ca_file)

        async def come() -> ssl.SSLObject:
            host, port = cluster.router.http_address.split(":")
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.close()
            found: ssl.SSLObject = writer.get_extra_info("ssl_object")
            return found

        assert all(found.version() for found in await asyncio.gather(*(come() for _ in range(20))))
