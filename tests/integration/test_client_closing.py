"""The Python clients where a call cannot come to its end: closed, read again after a failure, or without a bound; and
whose id an error has. Both clients do the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdcore.errors import InvalidRequest, Overloaded, RequestCancelled, RequestError, Unauthenticated
from router.client import AsyncClient, Client, Retry
from tests.support.null_cluster import NullCluster, pair
from tests.support.scripted_cluster import Event, ScriptedCluster, scripted_cluster
from tests.support.tiny_model import tiny_llama

CLOSED = "the client is closed"


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    with scripted_cluster() as scripted:
        scripted.endless, scripted.answers["on"] = "on", [Event(text="and on")]
        yield scripted


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.01)


# -- closing --------------------------------------------------------------------------------------------------------


async def test_closed_while_an_answer_is_read(cluster: ScriptedCluster) -> None:
    client, other = Client(cluster.address), AsyncClient(cluster.address)
    thread = asyncio.ensure_future(asyncio.to_thread(client.complete, "on", request_id="r"))
    task = asyncio.ensure_future(other.complete("on", request_id="r"))
    await eventually(lambda: len(cluster.requests) == 2)
    await asyncio.sleep(0.1)
    client.close()
    await other.close()
    for reader in (thread, task):
        with pytest.raises(RequestCancelled, match=CLOSED) as caught:
            await reader
        assert caught.value.request_id == "r"


async def test_a_task_that_is_cancelled_while_its_client_is_closed_is_cancelled(cluster: ScriptedCluster) -> None:
    other = AsyncClient(cluster.address)
    reader = asyncio.ensure_future(other.complete("on"))
    await eventually(lambda: len(cluster.requests) == 1)
    reader.cancel()
    await other.close()
    with pytest.raises(asyncio.CancelledError):
        await reader


@pytest.mark.parametrize(("call", "argument"), [("detokenize", [1]), ("cancel", "r")])
async def test_closed_while_another_call_runs(cluster: ScriptedCluster, call: str, argument: object) -> None:
    cluster.late_s = 20.0
    client, other = Client(cluster.address), AsyncClient(cluster.address)
    thread = asyncio.ensure_future(asyncio.to_thread(getattr(client, call), argument))
    task = asyncio.ensure_future(getattr(other, call)(argument))
    await eventually(lambda: len(cluster.keys) == 2)
    await asyncio.sleep(0.1)
    client.close()
    await other.close()
    for running in (thread, task):
        with pytest.raises(RequestCancelled, match=CLOSED):
            await running


async def test_closed_between_two_tries_or_before_a_call(cluster: ScriptedCluster) -> None:
    cluster.events, cluster.error = [], Overloaded("full", 0.5)
    client, other = Client(cluster.address, retry=Retry()), AsyncClient(cluster.address, retry=Retry())
    thread = asyncio.ensure_future(asyncio.to_thread(client.complete, "x"))
    task = asyncio.ensure_future(other.complete("x"))
    await eventually(lambda: len(cluster.requests) == 2)
    await asyncio.sleep(0.1)
    client.close()
    await other.close()
    for reader in (thread, task):
        with pytest.raises(RequestCancelled, match=CLOSED):
            await reader
    for call in (lambda: client.complete("x"), lambda: client.detokenize([1]), lambda: client.cancel("r")):
        with pytest.raises(RequestCancelled, match=CLOSED):
            call()
    for later in (other.complete("x"), other.detokenize([1]), other.cancel("r")):
        with pytest.raises(RequestCancelled, match=CLOSED):
            await later
    assert len(cluster.requests) == 2
    client.close()
    await other.close()


# -- read again -----------------------------------------------------------------------------------------------------


async def test_what_a_failed_answer_is_asked_for_again_fails_alike(cluster: ScriptedCluster) -> None:
    with Client(cluster.address) as client:
        cancelled, closed, unread = client.generate("on"), client.generate("on"), client.generate("on")
        for stream in (cancelled, closed):
            next(stream)
        cancelled.cancel()
        with pytest.raises(RequestCancelled):
            next(cancelled)
        closed.close()
        unread.close()
        for stream in (cancelled, closed, unread):
            for _ in range(2):
                with pytest.raises(RequestCancelled) as caught:
                    stream.collect()
                assert caught.value.request_id == stream.request_id
                assert len(caught.value.__notes__) == 1
        cluster.events, cluster.error = [], Overloaded("full", 9.0)
        full = client.generate("x")
        for _ in range(2):
            with pytest.raises(Overloaded):
                full.collect()
        with pytest.raises(Overloaded):
            full.samples()
    async with AsyncClient(cluster.address) as other:
        async with other.generate("on") as left:
            await anext(left)
        with pytest.raises(RequestCancelled):
            await left.collect()
        again = other.generate("x")
        for _ in range(2):
            with pytest.raises(Overloaded):
                await again.collect()


# -- without a bound ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e10, 9e9, 1e9, None])
async def test_a_timeout_may_be_as_long_as_one_likes(cluster: ScriptedCluster, timeout_s: float | None) -> None:
    with Client(cluster.address) as client:
        assert client.complete("x", timeout_s=timeout_s).text == "Because so."
        assert client.cancel("r", timeout_s=timeout_s or 10.0)
        assert client.detokenize([1], timeout_s=timeout_s or 10.0) == "t1"
    async with AsyncClient(cluster.address) as other:
        assert (await other.complete("x", timeout_s=timeout_s)).text == "Because so."


@pytest.mark.parametrize("timeout_s", [math.nan, -1.0, -math.inf])
async def test_a_timeout_that_is_none_is_refused_at_once(cluster: ScriptedCluster, timeout_s: float) -> None:
    refused = "timeout_s: a number of seconds"
    with Client(cluster.address) as client:
        with pytest.raises(ValueError, match=refused):
            client.generate("x", timeout_s=timeout_s)
        with pytest.raises(ValueError, match=refused):
            client.detokenize([1], timeout_s=timeout_s)
        with pytest.raises(ValueError, match=refused):
            client.cancel("r", timeout_s=timeout_s)
    async with AsyncClient(cluster.address) as other:
        with pytest.raises(ValueError, match=refused):
            other.generate("x", timeout_s=timeout_s)
        with pytest.raises(ValueError, match=refused):
            await other.detokenize([1], timeout_s=timeout_s)
        with pytest.raises(ValueError, match=refused):
            await other.cancel("r", timeout_s=timeout_s)
    assert not cluster.keys, "nothing was asked"


# -- whose id -------------------------------------------------------------------------------------------------------


async def test_an_error_has_the_id_that_is_in_the_router_s_log(cluster: ScriptedCluster) -> None:
    cluster.events, cluster.error = [], Unauthenticated("who are you?")
    for made, known_as in (("", "mine"), ("of-the-router", "of-the-router")):
        cluster.made_id = made
        errors: list[RequestError] = []
        with Client(cluster.address) as client, pytest.raises(Unauthenticated) as caught:
            client.complete("x", request_id="mine")
        errors.append(caught.value)
        async with AsyncClient(cluster.address) as other:
            with pytest.raises(Unauthenticated) as caught:
                await other.complete("x", request_id="mine")
        errors.append(caught.value)
        for error in errors:
            assert error.request_id == known_as
            assert error.__notes__ == [f"request {known_as}"]


async def test_an_id_that_a_router_does_not_take_is_not_the_error_s(tmp_path: Path) -> None:
    async with NullCluster(tiny_llama(tmp_path / "tiny"), pair()) as cluster:
        with pytest.raises(InvalidRequest, match="request_id") as caught:
            await cluster.client.complete("text", request_id="no spaces")
        assert caught.value.request_id not in ("", "no spaces")
        with pytest.raises(InvalidRequest, match="prompt") as caught:
            await cluster.client.complete("", request_id="mine")
        assert caught.value.request_id == "mine"


# -- keys -----------------------------------------------------------------------------------------------------------


async def test_every_call_sends_the_key(cluster: ScriptedCluster) -> None:
    with Client(cluster.address, api_key="k") as client:
        client.complete("x")
        client.model()
        client.detokenize([1])
        assert client.cancel("r")
    assert cluster.keys == ["Bearer k"] * 4
    async with AsyncClient(cluster.address, api_key="k") as other:
        await other.complete("x")
        await other.model()
        await other.detokenize([1])
        assert await other.cancel("r")
    assert cluster.keys == ["Bearer k"] * 8
