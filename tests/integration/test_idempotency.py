"""Idempotency keys: a request that carries one runs once while its first attempt lives, on whichever router."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import grpc
import openai
import pytest

from cluster import router_members
from cluster.claims import Granted
from cluster.membership import MembershipServer
from pdcore.clock import ManualClock, MonotonicClock
from pdcore.config import RouterConfig
from pdcore.errors import AlreadyRunning, InvalidRequest, Overloaded, RequestError, Unavailable
from pdcore.types import RequestKey, Role
from protos import open_inference_pb2, routers_pb2, routers_pb2_grpc
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from router.claims import Claim, Claims, claim_key
from router.client import AsyncClient, Sampling
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.router_fleet import RouterFleet
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


class Gate:
    """A hook that holds every request at its first token until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.reached: list[str] = []

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if point == "token" and not self.opened.is_set():
            self.reached.append(key.request_id)
            await self.opened.wait()


def alone(gate: Gate) -> list[NullWorker]:
    return [NullWorker("aggregated-0", Role.AGGREGATED, hook=gate)]


async def begin(client: AsyncClient, gate: Gate, request_id: str, **request: str) -> asyncio.Task[object]:
    """Start a request; returns once it is on a worker. Raises what it ends with, if it does before that."""
    task = asyncio.ensure_future(client.complete([1, 2], Sampling(max_tokens=3), request_id=request_id, **request))
    await until(lambda: request_id in gate.reached or task.done(), f"{request_id} is on a worker")
    if task.done():
        task.result()
    return task


async def test_one_at_a_time_on_whichever_router(model: Path) -> None:
    gate = Gate()
    workers = alone(gate)
    async with RouterFleet(model, workers) as fleet:
        one, two = fleet.clients
        first = await begin(one, gate, "first", idempotency_key="order 17", tenant="a")
        for client in (one, two):
            with pytest.raises(AlreadyRunning, match="'first' on router-0") as caught:
                await client.complete([3], Sampling(max_tokens=3), idempotency_key="order 17", tenant="a")
            assert caught.value.running_id == "first"
        # Nothing is shared among tenants, nor with requests without a key.
        other = await begin(two, gate, "other", idempotency_key="order 17", tenant="b")
        plain = await begin(two, gate, "plain", tenant="a")
        assert workers[0].count("generate", "first") == 1
        assert sum(workers[0].commands.values()) == 3, "no worker has heard of the refused ones"
        gate.opened.set()
        await asyncio.gather(first, other, plain)
        # Who has heard of the end may use the key again, at once and anywhere.
        for client in (two, one, two):
            answer = await client.samples([3], Sampling(max_tokens=2, n=3), idempotency_key="order 17", tenant="a")
            assert len(answer) == 3
        assert not fleet.controller.routers.claims.holders(time.monotonic())


async def test_one_at_a_time_on_every_interface(model: Path) -> None:
    """Several prompts under one key do not exclude each other, but all of them whoever comes with it meanwhile."""
    gate = Gate()
    async with (
        RouterFleet(model, alone(gate), http_port=0) as fleet,
        grpc.aio.insecure_channel(fleet.routers[0].address) as channel,
        openai.AsyncOpenAI(
            base_url=f"http://{fleet.routers[1].http_address}/v1", api_key="none", max_retries=0
        ) as api,
    ):
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        message = open_inference_pb2.ModelInferRequest(model_name="null", id="texts")
        texts = message.inputs.add(name="text_input", datatype="BYTES", shape=[2])
        texts.contents.bytes_contents.extend([b"a", b"b"])
        message.parameters["max_tokens"].int64_param = 2
        message.parameters["idempotency_key"].string_param = "k"
        key = {"idempotency-key": "k"}
        ask = partial(api.completions.create, model="null", prompt=["a", "b"], max_tokens=2, extra_headers=key)
        first = infer(message)
        await until(lambda: {"texts/0", "texts/1"} <= set(gate.reached), "both texts are on a worker")
        with pytest.raises(openai.ConflictError) as conflict:
            await ask()
        assert (conflict.value.code, conflict.value.status_code) == ("idempotency_key_in_use", 409)
        assert "texts/" in str(conflict.value)  # whichever of the two is refused first
        gate.opened.set()
        await first
        gate.opened.clear()
        second = asyncio.ensure_future(ask())
        await until(lambda: len(gate.reached) >= 4, "both prompts are on a worker")
        with pytest.raises(grpc.aio.AioRpcError) as exists:
            await infer(message)
        assert exists.value.code() is grpc.StatusCode.ALREADY_EXISTS
        gate.opened.set()
        assert len((await second).choices) == 2
        await fleet.empty()
        assert not fleet.controller.routers.claims.holders(time.monotonic())


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline", "shed"])
async def test_every_end_frees_the_key(model: Path, how: str) -> None:
    gate = Gate()
    async with RouterFleet(model, alone(gate), max_queue=1, max_running_per_worker=1) as fleet:
        one, two = fleet.clients
        claims = fleet.controller.routers.claims
        if how == "shed":
            await asyncio.gather(begin(one, gate, "a"), return_exceptions=True)
            waiting = asyncio.ensure_future(one.complete([1], Sampling(max_tokens=3), request_id="b"))
            await until(lambda: fleet.routers[0]._dispatcher.queued == 1, "one waits")
            with pytest.raises(Overloaded):
                await one.complete([1], Sampling(max_tokens=3), idempotency_key="k")
            waiting.cancel()
        elif how == "deadline":
            with pytest.raises(RequestError):
                await one.complete([1], Sampling(max_tokens=3), idempotency_key="k", timeout_s=0.5)
        else:
            first = await begin(one, gate, "first", idempotency_key="k")
            assert len(claims.holders(time.monotonic())) == 1
            if how == "cancel":
                assert await one.cancel("first")
                await first
            else:
                first.cancel()
        await until(lambda: not claims.holders(time.monotonic()), "the key is free")
        gate.opened.set()
        await fleet.empty()
        assert (await two.complete([1], Sampling(max_tokens=3), idempotency_key="k")).finish_reason == "length"


@pytest.mark.parametrize("key", ["x" * 129, "tab\there", "schlüssel"])
async def test_bad_keys_are_refused(model: Path, key: str) -> None:
    async with NullCluster(model, pair()) as cluster:
        with pytest.raises(InvalidRequest, match="128") as caught:
            await cluster.client.complete([1], Sampling(max_tokens=3), idempotency_key=key)
        assert caught.value.field == "idempotency_key"


async def test_without_a_controller_keys_are_refused_and_the_rest_is_served(model: Path) -> None:
    gate = Gate()
    gate.opened.set()
    async with RouterFleet(model, alone(gate), count=1) as fleet:
        (client,) = fleet.clients
        await fleet.controller.stop()
        with pytest.raises(Unavailable, match="cannot be claimed"):
            await client.complete([1], Sampling(max_tokens=3), idempotency_key="k")
        assert (await client.complete([1], Sampling(max_tokens=3))).finish_reason == "length"
        assert fleet.workers["aggregated-0"].commands.total() == 1
        assert fleet.routers[0]._claims.held_keys == 0


async def test_a_new_controller_learns_what_is_held_before_it_gives_anything(model: Path) -> None:
    gate = Gate()
    async with RouterFleet(model, alone(gate), dead_after_s=1.0, claim_ttl_s=3.0) as fleet:
        one, two = fleet.clients
        first = await begin(one, gate, "first", idempotency_key="held")
        await fleet.controller.stop()
        await fleet.start_controller()
        claims = fleet.controller.routers.claims
        words: set[str] = set()
        while not claims.holders(time.monotonic()):  # and until then nothing is given
            with pytest.raises((Unavailable, AlreadyRunning)) as early:
                await two.complete([1], Sampling(max_tokens=1), idempotency_key="held")
            words.add(str(early.value).rpartition("; ")[0])
            await asyncio.sleep(0.02)
        await until(lambda: fleet.controller.routers.listed("router-0"), "its router has found the new one")
        with pytest.raises(AlreadyRunning, match="'first'"):
            await two.complete([1], Sampling(max_tokens=1), idempotency_key="held")
        new: asyncio.Task[object] | None = None
        while new is None:
            try:
                new = await begin(two, gate, "new", idempotency_key="new")
            except Unavailable as error:
                words.add(str(error).rpartition("; ")[0])
        assert "the idempotency key cannot be claimed: the controller has just been started" in words
        with pytest.raises(AlreadyRunning, match="'first'"):
            await two.complete([1], Sampling(max_tokens=1), idempotency_key="held")
        gate.opened.set()
        await asyncio.gather(first, new)
        await until(lambda: not claims.holders(time.monotonic()), "both keys are free")


async def test_what_cannot_be_renewed_is_ended_before_another_may_have_its_key(model: Path) -> None:
    gate = Gate()
    async with RouterFleet(model, alone(gate), count=1, dead_after_s=1.0, claim_ttl_s=2.0) as fleet:
        (client,) = fleet.clients
        claims = fleet.controller.routers.claims
        first = await begin(client, gate, "first", idempotency_key="k")
        plain = await begin(client, gate, "plain")
        ((key, held),) = fleet.routers[0]._claims._live.items()
        assert held.valid_until <= claims._claims[key].expires, "the router gives it up before the controller does"
        await fleet.controller.stop()
        with pytest.raises(Unavailable, match="could not be renewed"):
            await first
        await until(lambda: fleet.workers["aggregated-0"].count("abort", "first") == 1, "its worker is told")
        gate.opened.set()
        await plain


async def test_another_router_s_claim_ends_the_request_that_has_lost_its_key(model: Path) -> None:
    gate = Gate()
    async with RouterFleet(model, alone(gate), count=1, dead_after_s=1.0, claim_ttl_s=2.0) as fleet:
        (client,) = fleet.clients
        claims = fleet.controller.routers.claims
        first = await begin(client, gate, "first", idempotency_key="k")
        # As if the controller had forgotten it, and somebody else had come first.
        ((key, mine),) = claims.holders(time.monotonic()).items()
        claims.release(key, mine)
        other = mine._replace(router_id="router-9", request_id="other")
        assert claims.claim(key, other, 2.0, time.monotonic()) == Granted()
        with pytest.raises(Unavailable, match="another request"):
            await first
        gate.opened.set()


async def test_a_key_in_use_is_told_once_its_router_s_death_would_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: what a router asks the controller, while another one leaves, is replaced, or dies."""
    controller = MembershipServer("127.0.0.1", claim_ttl_s=600.0, claim_grace_s=0.0)
    await controller.start()
    members = controller.routers
    async with grpc.aio.insecure_channel(controller.address) as channel:
        stub = routers_pb2_grpc.RoutersStub(channel)

        async def join(router_id: str, incarnation: str) -> grpc.aio.StreamStreamCall:
            call = stub.Register()
            router = routers_pb2.RouterDescription(router_id=router_id, incarnation=incarnation, address="a:1")
            await call.write(routers_pb2.RouterRegistration(router=router, state=routers_pb2.ROUTER_STATE_SERVING))
            assert isinstance(await call.read(), routers_pb2.RouterRegistrationReply)
            return call

        async def ask(router_id: str, incarnation: str) -> str:
            holder = routers_pb2.ClaimHolder(
                router_id=router_id, incarnation=incarnation, request_id=f"of {router_id}"
            )
            reply = await stub.Claim(routers_pb2.ClaimRequest(key=b"k" * 32, holder=holder, ttl_s=600.0))
            return str(reply.held_by.request_id)

        async def asked(router_id: str, incarnation: str) -> asyncio.Task[str]:
            """A claim that waits for news."""
            before = len(members._gone._waiters)  # type: ignore[attr-defined]
            task = asyncio.ensure_future(ask(router_id, incarnation))
            await until(lambda: len(members._gone._waiters) > before, "it waits")  # type: ignore[attr-defined]
            return task

        a, b = await join("a", "1"), await join("b", "1")
        assert await ask("a", "1") == ""
        assert await ask("b", "1") == "of a"
        # It leaves the list, and may live on: nobody knows.
        a.cancel()
        await until(lambda: not members.listed("a"), "it is off the list")
        with pytest.raises(grpc.aio.AioRpcError, match="'of a' has it on a, which is silent") as silent:
            await ask("b", "1")
        assert silent.value.code() is grpc.StatusCode.UNAVAILABLE
        # It is known to be dead a moment later.
        monkeypatch.setattr(router_members, "SETTLE_S", 30.0)
        waiting = await asked("b", "1")
        members.died("a", "1")
        assert await waiting == ""
        # The one that has it is replaced, and one that asks is.
        a = await join("a", "2")
        waiting = await asked("a", "2")
        b2 = await join("b", "2")
        assert await waiting == ""
        waiting = await asked("b", "2")
        b3 = await join("b", "3")
        with pytest.raises(grpc.aio.AioRpcError, match="has been replaced") as replaced:
            await waiting
        assert replaced.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert [holder.request_id for holder in members.claims.holders(time.monotonic()).values()] == ["of a"]
        # It ends by itself while another waits.
        monkeypatch.setattr(router_members, "SETTLE_S", 1.0)
        waiting = await asked("b", "3")
        ((key, holder),) = members.claims.holders(time.monotonic()).items()
        members.claims.release(key, holder)
        assert await waiting == ""
        for call in (a, b, b2, b3):
            call.cancel()
    await controller.stop()


class SlowRenewals(routers_pb2_grpc.RoutersServicer):
    """A controller that answers a renewal when it is told to, and notes what comes."""

    def __init__(self) -> None:
        self.renewing = asyncio.Event()
        self.answer = asyncio.Event()
        self.released: list[tuple[str, int]] = []

    async def Claim(self, request: routers_pb2.ClaimRequest, context: object) -> routers_pb2.ClaimReply:
        return routers_pb2.ClaimReply()

    async def Renew(self, request: routers_pb2.RenewClaimsRequest, context: object) -> routers_pb2.RenewClaimsReply:
        self.renewing.set()
        await self.answer.wait()
        return routers_pb2.RenewClaimsReply()

    async def Release(
        self, request: routers_pb2.ReleaseClaimRequest, context: object
    ) -> routers_pb2.ReleaseClaimReply:
        self.released.append((request.holder.request_id, request.holder.serial))
        return routers_pb2.ReleaseClaimReply()


async def test_a_renewal_that_is_overtaken_by_the_release_is_undone() -> None:
    server = grpc.aio.server()
    controller = SlowRenewals()
    routers_pb2_grpc.add_RoutersServicer_to_server(controller, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    config = RouterConfig("r", "m", "m", address, heartbeat_s=0.1, dead_after_s=1.0, claim_ttl_s=20.0)
    claims = Claims(config, "inc", MonotonicClock(), lambda request_id, error: None)
    claims._ttl_s = 8.0  # renewed after 2 s; an answer is waited for 1 s
    claims.start()
    try:
        async with claims.held("t", "k", "first"):
            await asyncio.wait_for(controller.renewing.wait(), 10.0)
        assert controller.released == [("first", 1)]
        controller.answer.set()
        await until(lambda: controller.released == [("first", 1)] * 2, "it is released again")
    finally:
        await claims.stop()
        await server.stop(0)


def test_it_is_given_up_a_little_before_its_time() -> None:
    clock = ManualClock(100.0)
    lost: list[str] = []
    config = RouterConfig("r", "m", "m", "c", claim_ttl_s=10.0)
    claims = Claims(config, "inc", clock, lambda request_id, error: lost.append(request_id))
    claims._live = {b"k": Claim(b"k", "first", 1, clock.now() + 10.0)}
    clock.advance(8.9)
    claims._end_expired()
    assert not lost
    clock.advance(0.2)
    claims._end_expired()
    assert (lost, claims.held_keys) == (["first"], 0)


def test_tenants_and_keys_cannot_be_confused() -> None:
    keys = {claim_key(tenant, key) for tenant, key in [("a", "bc"), ("ab", "c"), ("", "abc"), ("1:a", "b")]}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
