"""The membership service over real gRPC: who is in the list, when, and who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.membership import MAX_REPLACED, MembershipServer
from pdcore.errors import ConfigError
from protos import kv_pb2, membership_pb2, membership_pb2_grpc, worker_pb2
from router.membership import MembershipWatcher

SERVING = membership_pb2.WORKER_STATE_SERVING
DRAINING = membership_pb2.WORKER_STATE_DRAINING
SHAPE = {
    "model_digest": "aa",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
    "block_size": 16,
}


ROLES = {"prefill": worker_pb2.WORKER_ROLE_PREFILL, "decode": worker_pb2.WORKER_ROLE_DECODE}


def describe(
    worker_id: str = "prefill-0", incarnation: str = "i1", **shape: object
) -> membership_pb2.WorkerDescription:
    return membership_pb2.WorkerDescription(
        worker_id=worker_id,
        incarnation=incarnation,
        role=ROLES[worker_id.partition("-")[0]],
        address="127.0.0.1:1",
        model=worker_pb2.ModelDescription(name="tiny", digest="aa"),
        geometry=kv_pb2.Geometry(**{**SHAPE, **shape}),
    )


class Cluster:
    """A server and a channel to it."""

    def __init__(self, server: MembershipServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.stub = membership_pb2_grpc.MembershipStub(channel)

    async def register(
        self, worker: membership_pb2.WorkerDescription, state: int = SERVING
    ) -> grpc.aio.StreamStreamCall:
        """Register and return the open stream. Raises AioRpcError if refused."""
        call = self.stub.Register()
        await call.write(membership_pb2.Registration(worker=worker, state=state))
        reply = await asyncio.wait_for(call.read(), 5.0)
        if reply is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(await call.code(), None, None, details=await call.details())
        assert reply.version >= 1
        return call

    async def until(self, condition: Callable[[dict[str, membership_pb2.Member]], bool]) -> membership_pb2.MemberList:
        """The first watched list that satisfies the condition."""

        async def watch() -> membership_pb2.MemberList:
            async for members in self.stub.Watch(membership_pb2.WatchRequest(watcher_id="test")):
                if condition({member.worker.worker_id: member for member in members.members}):
                    return members
            raise AssertionError("the watch ended")

        return await asyncio.wait_for(watch(), 10.0)


@asynccontextmanager
async def serving(**options: float) -> AsyncIterator[Cluster]:
    server = MembershipServer("127.0.0.1", **options)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Cluster(server, channel)
    finally:
        await server.stop()


async def heartbeat(call: grpc.aio.StreamStreamCall, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await call.write(membership_pb2.Registration(state=SERVING))


async def test_worker_is_listed_while_its_stream_lives() -> None:
    async with serving() as cluster:
        empty = await cluster.until(lambda members: not members)
        call = await cluster.register(describe())
        listed = await cluster.until(lambda members: "prefill-0" in members)
        assert listed.version > empty.version
        assert listed.members[0].worker == describe()
        assert listed.members[0].state == SERVING
        await call.done_writing()  # a clean end
        gone = await cluster.until(lambda members: not members)
        assert gone.version > listed.version
        call = await cluster.register(describe())
        await cluster.until(lambda members: "prefill-0" in members)
        call.cancel()  # an end as by death
        await cluster.until(lambda members: not members)


async def test_silent_worker_is_removed_and_a_speaking_one_stays() -> None:
    async with serving(dead_after_s=0.4) as cluster:
        silent = await cluster.register(describe("prefill-0"))
        speaking = await cluster.register(describe("prefill-1"))
        beats = asyncio.ensure_future(heartbeat(speaking, 0.05))
        try:
            await cluster.until(lambda members: set(members) == {"prefill-1"})
            assert await asyncio.wait_for(silent.code(), 5.0) == grpc.StatusCode.DEADLINE_EXCEEDED
            await asyncio.sleep(0.8)
            assert [member.worker.worker_id for member in cluster.server.members().members] == ["prefill-1"]
        finally:
            beats.cancel()


async def test_stream_that_says_nothing_is_ended() -> None:
    async with serving(dead_after_s=0.2) as cluster:
        call = cluster.stub.Register()
        assert await asyncio.wait_for(call.code(), 5.0) == grpc.StatusCode.DEADLINE_EXCEEDED
        assert not cluster.server.members().members


async def test_draining_is_passed_on() -> None:
    async with serving() as cluster:
        call = await cluster.register(describe())
        await call.write(membership_pb2.Registration(state=DRAINING))
        await cluster.until(lambda members: members["prefill-0"].state == DRAINING if members else False)


async def test_watcher_hears_every_change_and_signs_of_life() -> None:
    async with serving(refresh_s=0.1) as cluster:
        watch = cluster.stub.Watch(membership_pb2.WatchRequest())
        first = await asyncio.wait_for(watch.read(), 5.0)
        again = await asyncio.wait_for(watch.read(), 5.0)
        assert first == again  # nothing has changed: a sign of life
        await cluster.register(describe())
        while not again.members:
            again = await asyncio.wait_for(watch.read(), 5.0)
        assert again.version > first.version


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dtype", "float16", ["dtype", "'bfloat16'", "'float16'", "kv_conversion"]),
        ("num_layers", 4, ["num_layers", "has 3", "has 4"]),
        ("num_kv_heads", 1, ["num_kv_heads", "has 2", "has 1"]),
        ("head_dim", 64, ["head_dim", "has 16", "has 64"]),
        ("model_digest", "bb", ["model_digest", "'aa'", "'bb'", "'tiny'"]),
    ],
)
async def test_misfit_is_refused_with_both_values(field: str, value: object, words: list[str]) -> None:
    async with serving() as cluster:
        await cluster.register(describe())
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await cluster.register(describe("decode-0", **{field: value}))
        assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert all(word in refusal.value.details() for word in [*words, "prefill-0", "decode-0"])
        assert len(cluster.server.members().members) == 1


async def test_a_pool_has_one_dtype_and_the_decode_pool_one_that_takes_the_prefill_pool_s() -> None:
    async with serving() as cluster:
        await cluster.register(describe())
        await cluster.register(describe("decode-0", dtype="float32"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"dtype differs.*'float32'.*'bfloat16'"):
            await cluster.register(describe("decode-1"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"dtype differs.*'bfloat16'.*'float32'"):
            await cluster.register(describe("prefill-1", dtype="float32"))
    async with serving(kv_conversion="rounding") as cluster:
        await cluster.register(describe(dtype="float32"))
        await cluster.register(describe("decode-0"))


async def test_first_model_stays_the_cluster_s_model_when_its_worker_has_left() -> None:
    async with serving() as cluster:
        call = await cluster.register(describe())
        await call.done_writing()
        await cluster.until(lambda members: not members)
        with pytest.raises(grpc.aio.AioRpcError, match="model_digest differs"):
            await cluster.register(describe(model_digest="bb"))


async def test_block_sizes_may_differ() -> None:
    async with serving() as cluster:
        await cluster.register(describe())
        await cluster.register(describe("decode-0", block_size=32))
        assert len(cluster.server.members().members) == 2


async def test_new_incarnation_replaces_the_old_one_for_good() -> None:
    async with serving() as cluster:
        old = await cluster.register(describe(incarnation="i1"))
        await cluster.register(describe(incarnation="i2"))
        assert await asyncio.wait_for(old.code(), 5.0) == grpc.StatusCode.FAILED_PRECONDITION
        assert "'i2'" in await old.details()
        members = await cluster.until(lambda members: bool(members))
        assert [member.worker.incarnation for member in members.members] == ["i2"]
        # The end of the old stream has not taken the successor with it, and a zombie cannot come back.
        with pytest.raises(grpc.aio.AioRpcError, match="'i2'"):
            await cluster.register(describe(incarnation="i1"))
        assert [member.worker.incarnation for member in cluster.server.members().members] == ["i2"]


async def test_a_worker_that_restarts_for_ever_leaves_no_more_than_its_last_incarnations() -> None:
    async with serving() as cluster:
        for number in range(MAX_REPLACED + 10):
            await cluster.register(describe(incarnation=f"i{number}"))
        assert len(cluster.server._replaced["prefill-0"]) == MAX_REPLACED
        with pytest.raises(grpc.aio.AioRpcError, match="which replaced 'i50'"):
            await cluster.register(describe(incarnation="i50"))


async def test_worker_may_register_again_while_its_old_stream_is_still_thought_alive() -> None:
    async with serving() as cluster:
        old = await cluster.register(describe())
        await cluster.register(describe())
        assert await asyncio.wait_for(old.code(), 5.0) == grpc.StatusCode.ABORTED
        assert len(cluster.server.members().members) == 1


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "address", "role", "geometry", "model", "state"])
async def test_incomplete_registration_is_refused(field: str) -> None:
    async with serving() as cluster:
        worker = describe()
        if field != "state":
            worker.ClearField(field)
        with pytest.raises(grpc.aio.AioRpcError, match=field) as refusal:
            await cluster.register(worker, 0 if field == "state" else SERVING)
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_stop_ends_every_stream_at_once() -> None:
    async with serving() as cluster:
        registration = await cluster.register(describe())
        watch = cluster.stub.Watch(membership_pb2.WatchRequest())
        await asyncio.wait_for(watch.read(), 5.0)
        await asyncio.wait_for(cluster.server.stop(), 5.0)
        assert await asyncio.wait_for(registration.code(), 5.0) == grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(watch.code(), 5.0)


async def test_a_watcher_stops_whatever_comes_at_that_moment() -> None:
    """`asyncio.wait_for` loses a cancellation that comes together with a result, before Python 3.12."""
    async with serving() as cluster:
        for i in range(60):
            watcher = MembershipWatcher(cluster.server.address, "watcher", lambda members: None)
            watcher.start()
            await asyncio.sleep(0.03)
            await cluster.register(describe(incarnation=f"i{i}"))
            await asyncio.sleep(0.0002 * (i % 20))
            async with asyncio.timeout(2.0):
                await watcher.stop()


async def test_taken_port_is_refused() -> None:
    async with serving() as cluster:
        port = int(cluster.server.address.rpartition(":")[2])
        second = MembershipServer("127.0.0.1", port)
        with pytest.raises(ConfigError, match=r"ray\.worker_host: cannot listen on .* in use"):
            await second.start()
