"""Several routers at one cluster: members of it, equal before its workers, and each alone in its death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from cluster import routers as cluster_routers
from cluster.child_process import ChildProcess
from cluster.reports import unfailing
from cluster.routers import RouterInfo, RouterProcesses
from pdcore.config import RouterConfig
from pdcore.errors import InvalidRequest, PdserveError, Unavailable
from pdcore.types import Role
from protos import admin_pb2, admin_pb2_grpc, routers_pb2, routers_pb2_grpc
from router.client import AsyncClient, Client, Sampling
from router.service import RouterServer
from tests.support.local_cluster import LocalCluster
from tests.support.null_cluster import pair, until
from tests.support.null_worker import NullWorker, token_of
from tests.support.processes import worker_config
from tests.support.router_fleet import RouterFleet
from tests.support.tiny_model import tiny_llama

SERVING, DRAINING = routers_pb2.ROUTER_STATE_SERVING, routers_pb2.ROUTER_STATE_DRAINING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def expected(prompt: list[int], count: int) -> tuple[int, ...]:
    return tuple(token_of(tuple(prompt), index) for index in range(count))


# -- as members -----------------------------------------------------------------------------------------------------


async def test_routers_are_listed_with_their_state_and_share_the_workers(model: Path) -> None:
    async with RouterFleet(model, pair()) as fleet:
        answers = await asyncio.gather(
            *(client.complete([n], Sampling(max_tokens=40)) for client in fleet.clients for n in range(20))
        )
        assert [a.token_ids for a in answers] == [expected([n], 40) for _ in fleet.clients for n in range(20)]
        async with grpc.aio.insecure_channel(fleet.routers[1].address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)

            async def listed() -> dict[str, int]:
                reply = await admin.GetStatus(admin_pb2.GetStatusRequest())
                return {member.router.router_id: member.state for member in reply.routers}

            assert await listed() == {"router-0": SERVING, "router-1": SERVING}
            await fleet.routers[0].drain(0.0)
            while (await listed())["router-0"] != DRAINING:
                await asyncio.sleep(0.02)
            await fleet.routers[0].stop()
            while "router-0" in await listed():
                await asyncio.sleep(0.02)


async def test_a_router_that_is_silent_is_off_the_list_and_one_that_was_replaced_is_told(model: Path) -> None:
    async with RouterFleet(model, pair(), dead_after_s=0.8, claim_ttl_s=2.0) as fleet:
        told: list[str] = []
        members = fleet.controller.routers
        new = RouterServer(fleet.router_config(0))
        fleet.routers[0]._registration._on_refused = told.append
        await new.start()
        await until(lambda: bool(told), "the old one hears that there is a new one")
        assert new.incarnation in told[0]
        assert [m.router.incarnation for m in members.members()] == [new.incarnation, fleet.routers[1].incarnation]
        await new.stop()
        async with grpc.aio.insecure_channel(fleet.controller.address) as channel:
            stub = routers_pb2_grpc.RoutersStub(channel)
            mute = routers_pb2.RouterDescription(router_id="mute", incarnation="i", address="a:1")
            call = stub.Register()
            await call.write(routers_pb2.RouterRegistration(router=mute, state=SERVING))
            assert isinstance(await call.read(), routers_pb2.RouterRegistrationReply)
            assert members.listed("mute")
            await until(lambda: not members.listed("mute"), "it is taken for dead")
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert members.listed("router-1")
            # What has a successor may claim nothing any more.
            holder = routers_pb2.ClaimHolder(router_id="router-0", incarnation=fleet.routers[0].incarnation)
            holder.request_id = "r"
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await stub.Claim(routers_pb2.ClaimRequest(key=b"k" * 32, holder=holder, ttl_s=1.0))
            assert late.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": b"short"}, "32 bytes"),
        ({"ttl_s": 11.0}, "at most 10"),
        ({"ttl_s": 0.0}, "above 0"),
        ({"holder": routers_pb2.ClaimHolder(router_id="r", incarnation="i")}, "request_id"),
        ({"holder": routers_pb2.ClaimHolder(router_id="r" * 300, incarnation="i", request_id="x")}, "router_id"),
    ],
)
async def test_a_claim_that_is_malformed_is_refused(model: Path, change: dict[str, object], words: str) -> None:
    async with (
        RouterFleet(model, [], count=0) as fleet,
        grpc.aio.insecure_channel(fleet.controller.address) as channel,
    ):
        good = {
            "key": b"k" * 32,
            "holder": routers_pb2.ClaimHolder(router_id="r", incarnation="i", request_id="x"),
            "ttl_s": 10.0,
        }
        stub = routers_pb2_grpc.RoutersStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await stub.Claim(routers_pb2.ClaimRequest(**(good | change)))  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# -- as clients see them --------------------------------------------------------------------------------------------


async def test_a_client_goes_on_with_another_router_before_the_first_token_only(model: Path) -> None:
    gone = 5

    async def slow(point: str, key: object, index: int) -> None:
        if point == "token" and index >= gone:
            await asyncio.sleep(60)

    async with RouterFleet(model, [NullWorker("aggregated-0", Role.AGGREGATED)]) as fleet:
        addresses = [router.address for router in fleet.routers]
        async with AsyncClient(",".join(addresses)) as client:
            # By turns, so both are used; a call for one request finds it wherever it is.
            for n in range(4):
                assert (await client.complete([n], Sampling(max_tokens=5))).token_ids == expected([n], 5)
            assert [router._dispatcher.counters.finished for router in fleet.routers] == [2, 2]
            fleet.workers["aggregated-0"].hook = slow
            events = [client.generate([n], Sampling(max_tokens=9), request_id=f"r{n}") for n in range(2)]
            for stream in events:
                await anext(stream)
            assert await client.cancel("r1")
            assert not await client.cancel("r2")
            # Within an answer there is no going on elsewhere.
            await fleet.routers[0].stop()
            with pytest.raises(Unavailable):
                async for _ in events[0]:
                    pass
            fleet.workers["aggregated-0"].hook = None
            for n in range(4):
                assert (await client.complete([n], Sampling(max_tokens=5))).token_ids == expected([n], 5)
            with Client(addresses) as blocking:
                for _ in range(2):
                    assert await asyncio.to_thread(lambda: blocking.tokenize("hi")) == await client.tokenize("hi")
                answer = await asyncio.to_thread(lambda: blocking.complete([1], Sampling(max_tokens=5)))
                assert answer.token_ids == expected([1], 5)
                with pytest.raises(Unavailable):  # it may be on the router that does not answer
                    await asyncio.to_thread(lambda: blocking.cancel("r0"))
            await fleet.routers[1].stop()
            with pytest.raises(Unavailable):
                await client.complete([1], Sampling(max_tokens=5))


# -- in processes of their own --------------------------------------------------------------------------------------


@asynccontextmanager
async def processes(fleet: RouterFleet, count: int = 2) -> AsyncIterator[tuple[RouterProcesses, list[str]]]:
    """Routers in processes, as `pdserve serve` runs several, and what is reported of them."""
    lines: list[str] = []
    members = fleet.controller.routers
    configs = [fleet.router_config(n) for n in range(count)]
    routers = RouterProcesses(configs, lines.append, listed=members.listed, died=members.died)
    try:
        await routers.start()
        await until(lambda: all(w.sessions >= count for w in fleet.workers.values()), "sessions of all routers")
        yield routers, lines
    finally:
        await routers.stop()


def pid_of(routers: RouterProcesses, number: int) -> int:
    info = routers._routers[number].info
    assert info is not None
    return info.pid


async def test_a_router_that_is_killed_comes_back_and_its_keys_are_free(model: Path) -> None:
    """Silence alone would take ten minutes to be noticed here, and keys twenty to be free."""
    held = asyncio.Event()

    async def hold(point: str, key: object, index: int) -> None:
        if point == "token" and index == 8:
            await held.wait()

    worker = NullWorker("aggregated-0", Role.AGGREGATED, hook=hold)
    async with (
        RouterFleet(model, [worker], count=0, dead_after_s=600.0, claim_ttl_s=1200.0, max_replays=0) as fleet,
        processes(fleet) as (routers, lines),
        AsyncClient(routers.addresses[0]) as one,
        AsyncClient(routers.addresses[1]) as two,
    ):
        lost = asyncio.ensure_future(one.complete([1], Sampling(max_tokens=20), idempotency_key="k"))
        kept = asyncio.ensure_future(two.complete([2], Sampling(max_tokens=20), request_id="kept"))
        await until(lambda: len(worker.held) == 2, "both are on the worker")
        addresses = list(routers.addresses)
        killed = pid_of(routers, 0)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await lost
        await until(lambda: [key.request_id for key in worker.held] == ["kept"], "its work is freed")
        held.set()
        assert (await kept).token_ids == expected([2], 20)
        assert (await two.complete([1], Sampling(max_tokens=20), idempotency_key="k")).token_ids == expected([1], 20)
        await until(lambda: any("router-0 is back" in line for line in lines), "it is started again", 60.0)
        assert list(routers.addresses) == addresses, "clients know it by its address"
        assert pid_of(routers, 0) != killed
        await until(lambda: fleet.controller.routers.listed("router-0"), "it is listed again")
        async with AsyncClient(routers.addresses) as any_of_both:
            for n in range(4):
                assert (await any_of_both.complete([n], Sampling(max_tokens=9))).token_ids == expected([n], 9)
        assert await routers.drain(30.0)


@pytest.mark.parametrize("level", ["warning", "info"])
async def test_the_log_of_a_process_has_what_is_asked_for(
    model: Path, capfd: pytest.CaptureFixture[str], level: str
) -> None:
    worker = NullWorker("aggregated-0", Role.AGGREGATED)
    async with (
        RouterFleet(model, [worker], count=0, log_level=level, log_prompts=True) as fleet,
        processes(fleet, 1) as (routers, _),
        AsyncClient(routers.addresses) as client,
    ):
        await client.complete("a prompt", Sampling(max_tokens=2), request_id="good")
        with pytest.raises(InvalidRequest):
            await client.complete([2], Sampling(temperature=9), request_id="bad")
    log = capfd.readouterr().err
    assert log.count('request good: its prompt is "') == 1, "whatever the level is"
    assert ("request bad fails: INVALID_REQUEST" in log) == (level == "info")


async def test_a_client_of_both_goes_on_at_the_other_with_its_key(model: Path) -> None:
    """At once, and though it has no mind to try again: where the first one died its key is free."""
    held = asyncio.Event()

    async def hold(point: str, key: object, index: int) -> None:
        if point == "token":
            await held.wait()

    worker = NullWorker("aggregated-0", Role.AGGREGATED, hook=hold)
    async with (
        RouterFleet(model, [worker], count=0, dead_after_s=600.0, claim_ttl_s=1200.0, max_replays=0) as fleet,
        processes(fleet) as (routers, lines),
        AsyncClient(routers.addresses) as both,
    ):
        options = {"request_id": "r", "idempotency_key": "k"}
        answer = asyncio.ensure_future(both.complete([1], Sampling(max_tokens=20), **options))
        await until(lambda: worker.count("generate", "r") == 1, "it is on the worker")
        os.kill(pid_of(routers, 0), signal.SIGKILL)
        await until(lambda: worker.count("generate", "r") == 2, "it is there again")
        held.set()
        assert (await answer).token_ids == expected([1], 20)
        await until(lambda: any("router-0 is back" in line for line in lines), "it is started again", 60.0)


async def test_a_router_that_stands_still_loses_its_leases_and_picks_up_when_it_wakes(model: Path) -> None:
    held = asyncio.Event()

    async def hold(point: str, key: object, index: int) -> None:
        if point == "token" and index == 8:
            await held.wait()

    worker = NullWorker("aggregated-0", Role.AGGREGATED, hook=hold)
    async with (
        RouterFleet(model, [worker], count=0, dead_after_s=1.0, claim_ttl_s=2.0) as fleet,
        processes(fleet) as (routers, lines),
        AsyncClient(routers.addresses[0]) as one,
        AsyncClient(routers.addresses[1]) as two,
    ):
        stopped = asyncio.ensure_future(one.complete([1], Sampling(max_tokens=20), request_id="stopped"))
        keyed = asyncio.ensure_future(one.complete([3], Sampling(max_tokens=20), idempotency_key="k"))
        await until(lambda: len(worker.held) == 2, "both are on the worker")
        os.kill(pid_of(routers, 0), signal.SIGSTOP)
        await until(lambda: not fleet.controller.routers.listed("router-0"), "it is off the list")
        held.set()
        assert (await two.complete([2], Sampling(max_tokens=20))).token_ids == expected([2], 20)
        claims = fleet.controller.routers.claims
        await until(lambda: not claims.holders(time.monotonic()), "its key is free")
        os.kill(pid_of(routers, 0), signal.SIGCONT)
        assert (await stopped).token_ids == expected([1], 20), "neither gap nor repeat"
        with pytest.raises(Unavailable, match="idempotency key"):  # somebody else may have had it meanwhile
            await keyed
        await until(lambda: fleet.controller.routers.listed("router-0"), "it is listed again")
        assert not any("died" in line for line in lines)


class ScriptedProcess:
    """A router that hangs, until it is killed; then each `start` goes as told (None: well)."""

    def __init__(self, config: RouterConfig, starts: list[Exception | None]) -> None:
        self.config = config
        self.router_id = config.router_id
        self.info: RouterInfo | None = None
        self._starts = [None, *starts]
        self._ended = asyncio.Event()

    async def start(self) -> RouterInfo:
        error = self._starts.pop(0)
        if error is not None:
            raise error
        self.info = RouterInfo("127.0.0.1:1", f"i{len(self._starts)}", 17, "")
        self._ended.clear()
        return self.info

    async def watch(self) -> int:
        await self._ended.wait()
        return -9

    def kill(self) -> None:
        self._ended.set()

    async def stop(self) -> None:
        self.kill()


async def test_a_router_that_hangs_is_killed_and_one_that_cannot_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = [PdserveError("no"), OSError("not yet"), RuntimeError("a mistake of ours"), None]
    for name, value in {"_FIRST_BACKOFF_S": 0.01, "_LOOK_S": 0.01, "_HUNG_AFTER": 0.0}.items():
        monkeypatch.setattr(cluster_routers, name, value)
    monkeypatch.setattr(cluster_routers, "RouterProcess", lambda config: ScriptedProcess(config, starts))
    lines: list[str] = []
    died: list[tuple[str, str]] = []

    def listed(router_id: str) -> bool:
        return bool(died)  # silent at first, then again on the list

    config = RouterConfig("r0", "m", "m", "c")
    routers = RouterProcesses([config], lines.append, listed=listed, died=lambda *who: died.append(who))
    await routers.start()
    await until(lambda: any("is back" in line for line in lines), "it is back")
    await routers.stop()
    assert died == [("r0", "i4")]
    words = ("is ready", "silent", "has died (exit status -9)", *["not back, next try"] * 3, "is back")
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * len(words), lines


async def test_a_router_is_started_again_though_nobody_reads_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_FIRST_BACKOFF_S": 0.01, "_LOOK_S": 0.01, "_HUNG_AFTER": 0.0}.items():
        monkeypatch.setattr(cluster_routers, name, value)
    monkeypatch.setattr(
        cluster_routers, "RouterProcess", lambda config: ScriptedProcess(config, [OSError("not yet"), None])
    )
    died: list[tuple[str, str]] = []

    def gone(_: str) -> None:
        raise BrokenPipeError

    report = unfailing(gone)
    config = RouterConfig("r0", "m", "m", "c")
    routers = RouterProcesses([config], report, listed=lambda _: bool(died), died=lambda *who: died.append(who))
    await routers.start()
    before = routers._routers[0].info
    await until(lambda: routers._routers[0].info is not before, "it is back")
    assert not any(keeper.done() for keeper in routers._keepers)
    await routers.stop()


@pytest.mark.parametrize(
    "says",
    [
        "",
        "print('READY {')",
        "print('READY 1')",
        "print('READY {}')",
        "print('Hello')",
        "import time; time.sleep(60)",
    ],
)
async def test_a_process_that_says_something_else_is_ended(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[ChildProcess] = []

    def other(_: Sequence[str]) -> ChildProcess:
        linger = (
            "import sys, time; sys.stdin.readline()\n"
            + says
            + "\nsys.stdout.flush(); sys.stdout.close()\ntime.sleep(600)"
        )
        children.append(ChildProcess([sys.executable, "-c", linger]))
        return children[-1]

    monkeypatch.setattr(cluster_routers, "ChildProcess", other)
    monkeypatch.setattr(cluster_routers, "_START_S", 2.0)
    router = cluster_routers.RouterProcess(RouterConfig("r0", "m", "m", "c"))
    for _ in range(2):
        with pytest.raises(PdserveError, match=r"r0 (cannot start|is not ready)"):
            await router.start()
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2
    await router.stop()


async def test_a_process_that_cannot_start_is_an_error(model: Path) -> None:
    config = RouterConfig("r0", "/nowhere", "m", "127.0.0.1:1")
    routers = RouterProcesses([config], print, listed=bool, died=lambda *_: None)
    with pytest.raises(PdserveError, match="r0 cannot start"):
        await routers.start()
    assert await routers.drain(1.0), "there is nothing to wait for"
    await routers.stop()


# -- before real workers ------------------------------------------------------------------------------------------


def test_real_workers_free_what_a_dead_router_had_at_once(model: Path, tmp_path: Path) -> None:
    """Of two routers one is killed, with requests that run, wait for their client, and are on their way to the other
    pool. The workers would wait a minute for a word of it."""
    configs = [
        replace(worker_config(model, role, dtype="float32"), dead_after_s=60.0)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    with LocalCluster(model, tmp_path, configs, forked=True) as cluster:
        other = cluster.start_router("router-1")
        prompt = [(5 * i) % 250 + 1 for i in range(90)]
        with Client(cluster.address) as mine, Client(other.address) as theirs:
            alone = mine.complete(prompt, Sampling(max_tokens=60, temperature=0, ignore_eos=True)).token_ids
            long = Sampling(max_tokens=1900, temperature=0, ignore_eos=True)
            doomed = [theirs.generate([*prompt, n], long) for n in range(3)]
            for stream in doomed[:2]:
                next(stream)  # and no more: these pause when their windows are used up
            beside = mine.generate(prompt, Sampling(max_tokens=60, temperature=0, ignore_eos=True))
            tokens = list(next(beside).token_ids)
            later = [theirs.generate([*prompt, n, n], long) for n in range(2)]
            for stream in later:
                next(stream)
            other.kill()
            for event in beside:
                tokens.extend(event.token_ids)
            assert tuple(tokens) == alone, "the other router's request has noticed nothing"
            cluster.assert_baseline(20.0)
            for stream in doomed[:2]:
                with pytest.raises(Unavailable):
                    list(stream)
        for worker in cluster.workers.values():
            log = worker.log.read_text()
            assert "session of router router-1 ends:" in log
            assert "the router was silent" not in log
