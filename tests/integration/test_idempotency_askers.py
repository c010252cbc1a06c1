"""Two requests that ask one router for the same idempotency key at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pdcore.clock import MonotonicClock
from pdcore.config import RouterConfig
from pdcore.errors import AlreadyRunning, RequestError, Unavailable
from protos import routers_pb2, routers_pb2_grpc
from router.claims import Claims
from tests.support.null_cluster import until


class SlowController(routers_pb2_grpc.RoutersServicer):
    """Says who has the key, once it is told to answer.

    Attributes:
        holder: who has it; empty if nobody. fails: instead of an answer. heard: what it was told, in this order.
    """

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.holder = ""
        self.fails = False
        self.heard: list[tuple[str, str]] = []

    async def Claim(
        self, request: routers_pb2.ClaimRequest, context: grpc.aio.ServicerContext
    ) -> routers_pb2.ClaimReply:
        name = request.holder.request_id
        self.heard.append(("claim", name))
        self.holder = self.holder or name
        await self.answer.wait()
        if self.fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many keys")
        if self.holder == name:
            return routers_pb2.ClaimReply()
        return routers_pb2.ClaimReply(held_by=routers_pb2.ClaimHolder(router_id="far", request_id=self.holder))

    async def Release(
        self, request: routers_pb2.ReleaseClaimRequest, context: object
    ) -> routers_pb2.ReleaseClaimReply:
        name = request.holder.request_id
        self.heard.append(("release", name))
        if self.holder == name:
            self.holder = ""
        return routers_pb2.ReleaseClaimReply()


@pytest.fixture
async def controller() -> SlowController:
    return SlowController()  # type: ignore[abstract]  # it has the methods that are called


@pytest.fixture
async def claims(controller: SlowController) -> AsyncIterator[Claims]:
    server = grpc.aio.server()
    routers_pb2_grpc.add_RoutersServicer_to_server(controller, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    config = RouterConfig("near", "m", "m", address, claim_ttl_s=20.0)
    claims = Claims(config, "inc", MonotonicClock(), lambda request_id, error: None)
    claims.start()
    yield claims
    await claims.stop()
    await server.stop(0)


class Asker:
    """A request that holds the key until `ends`, if it gets it."""

    def __init__(self, claims: Claims, name: str) -> None:
        self.ends = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(claims, name))

    async def _run(self, claims: Claims, name: str) -> RequestError | None:
        try:
            async with claims.held("tenant", "key", name):
                await self.ends.wait()
        except RequestError as error:
            return error
        return None


async def ask(claims: Claims, controller: SlowController, *names: str) -> list[Asker]:
    """One after the other; returns once the controller has heard of the first."""
    askers = [Asker(claims, name) for name in names]
    await until(lambda: bool(controller.heard), "the controller is asked")
    return askers


async def test_the_one_that_has_the_key_is_named(claims: Claims, controller: SlowController) -> None:
    """And not the one that has asked first: that never runs."""
    controller.holder = "elsewhere"
    askers = await ask(claims, controller, "first", "second", "third")
    controller.answer.set()
    errors = [await asker.task for asker in askers]
    assert [type(error) for error in errors] == [AlreadyRunning] * 3
    assert [error.running_id for error in errors if isinstance(error, AlreadyRunning)] == ["elsewhere"] * 3
    assert len({id(error) for error in errors}) == 3, "each has its own, with its own request id"
    assert controller.heard == [("claim", "first")]


async def test_the_first_one_is_named_if_it_gets_the_key(claims: Claims, controller: SlowController) -> None:
    first, second = await ask(claims, controller, "first", "second")
    controller.answer.set()
    error = await second.task
    assert isinstance(error, AlreadyRunning)
    assert error.running_id == "first"
    assert not first.task.done()
    first.ends.set()
    assert await first.task is None


async def test_nobody_gets_what_nobody_gives(claims: Claims, controller: SlowController) -> None:
    controller.fails = True
    askers = await ask(claims, controller, "first", "second")
    controller.answer.set()
    for asker in askers:
        error = await asker.task
        assert isinstance(error, Unavailable)
        assert "too many keys" in str(error)


async def test_the_next_one_asks_if_the_first_goes(claims: Claims, controller: SlowController) -> None:
    """Once the controller has been told, which might take the first for the holder."""
    first, second, third = await ask(claims, controller, "first", "second", "third")
    first.task.cancel()
    controller.answer.set()
    error = await third.task
    assert isinstance(error, AlreadyRunning)
    assert error.running_id == "second"
    assert controller.heard == [("claim", "first"), ("release", "first"), ("claim", "second")]
    assert claims.held_keys == 1
    second.ends.set()
    assert await second.task is None
