"""What the outside sees of a router: errors, health, reflection, limits, draining, and life without a controller."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from pdcore.config import RouterConfig
from pdcore.errors import ConfigError, InvalidRequest, ModelError, Unavailable, UnknownModel
from pdcore.types import ModelInfo, Role
from protos import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, worker_pb2
from router.calls import ClientGone
from router.client import AsyncClient, Client, Sampling, build_request
from router.generation_service import _Stream
from router.guard import _with_status
from router.service import RouterServer
from tests.integration.test_router_flow import Gate, expected
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.static_membership import StaticMembership
from tests.support.tiny_model import tiny_llama

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = "pdserve.v1.Generation"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


# -- errors ---------------------------------------------------------------------------------------------------------


def details_of(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.BadRequest, error_details_pb2.ErrorInfo]:
    bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    for detail in rpc_status.from_call(error).details:
        detail.Unpack(bad_request)
        detail.Unpack(info)
    return bad_request, info


async def test_bad_input_is_refused_with_details_and_touches_no_worker(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        bad = {
            "prompt": build_request(""),
            "sampling.top_p": build_request("x", Sampling(top_p=float("nan"))),
            "sampling.max_tokens": build_request("x", Sampling(max_tokens=10**6)),
            "token_ids.ids[0]": build_request([100_000]),
            "input": generation_pb2.GenerateRequest(),
            "request_id": build_request("x", request_id="no spaces"),
        }
        for field, request in bad.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            detail, info = details_of(caught.value)
            assert detail.field_violations[0].field == field
            assert detail.field_violations[0].description
            assert (info.reason, info.domain) == ("INVALID_REQUEST", "pdserve")
            assert dict(caught.value.trailing_metadata())["x-request-id"] == info.metadata["request_id"] != ""
        assert not any(worker.commands for worker in cluster.workers.values())
        assert cluster.dispatcher.running == 0


async def test_errors_come_back_as_they_were_meant(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        with pytest.raises(InvalidRequest) as invalid:
            await cluster.client.complete([1], Sampling(temperature=9))
        assert invalid.value.field == "sampling.temperature"
        with pytest.raises(UnknownModel) as unknown:
            await cluster.client.complete([1], model="gpt")
        assert (unknown.value.model, unknown.value.served) == ("gpt", ("null",))
        for call in (
            cluster.client.tokenize("x", model="gpt"),
            cluster.client.detokenize([1], model="gpt"),
        ):
            with pytest.raises(UnknownModel):
                await call
        with pytest.raises(InvalidRequest, match="has 4097 tokens") as long:
            await cluster.client.tokenize("x" * 4097)
        assert long.value.facts == {"context_tokens": "4096", "prompt_tokens": "4097"}
        # All that is known to be wrong, and whose request it is.
        with pytest.raises(InvalidRequest) as several:
            await cluster.client.samples(
                [1], Sampling(temperature=9, top_p=2, n=99), tenant="t" * 200, request_id="r"
            )
        fields = [field for field, _ in several.value.violations]
        assert fields == ["tenant", "sampling.temperature", "sampling.top_p", "sampling.n"]
        assert (several.value.request_id, several.value.reason) == ("r", "INVALID_REQUEST")
        with pytest.raises(InvalidRequest, match="cannot fit"):
            await cluster.client.tokenize("x" * (4 << 20))
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await cluster.client.detokenize([10_000])


async def test_too_large_a_message_is_refused_by_grpc(model: Path) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with (
        NullCluster(model, pair()) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=unlimited) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(build_request("x" * (17 << 20))).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Just below the limit it is read, and refused for what it says.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(build_request("x" * (15 << 20))).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await cluster.client.complete([1], Sampling(max_tokens=2))).finish_reason == "length"


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_what_is_no_message_is_the_client_s_mistake(
    model: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        name = f"/pdserve.v1.Generation/{method}"
        call = (channel.unary_stream if method == "Generate" else channel.unary_unary)(name)
        for junk in (b"\xff\xff\xff\xff", b"\x0a\x05ab", b"\x1a\x02\xff\xfe"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call(junk).read() if method == "Generate" else call(junk))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            _, info = details_of(caught.value)
            assert info.reason == "MALFORMED_MESSAGE"
            assert info.metadata["request_id"]
        assert (await cluster.client.complete([1], Sampling(max_tokens=2))).finish_reason == "length"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("gone", ["metadata", "message"])
async def test_nothing_is_written_once_a_client_has_gone(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    """It went while metadata was sent, and nobody had told grpc.aio: the call returned, and was ended with metadata
    for the second time, of which grpc's core wants to hear nothing (TOO_MANY_OPERATIONS, with a traceback)."""
    reached = asyncio.Event()

    async def fails_halfway(stream: _Stream, *_: object) -> None:
        sending = asyncio.ensure_future(stream._context.send_initial_metadata(()))
        await asyncio.sleep(0)
        sending.cancel()
        reached.set()
        raise ClientGone

    async with NullCluster(model, pair()) as cluster:
        if gone == "message":
            monkeypatch.setattr(_Stream, "begin", _nothing)
        monkeypatch.setattr(_Stream, "begin" if gone == "metadata" else "write", fails_halfway)
        answer = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=2), timeout_s=60.0))
        await reached.wait()
        await asyncio.sleep(0.1)
        answer.cancel()
        await cluster.empty()
        await until(lambda: cluster.dispatcher.running == 0, "the router forgot it")
        gc.collect()
        await asyncio.sleep(0)
    assert "Traceback" not in caplog.text


async def _nothing(*_: object) -> None:
    """A sink that begins without a word."""


@pytest.mark.parametrize("error", [ClientGone(), grpc.aio.UsageError("over"), grpc.aio.InternalError("broken")])
async def test_a_call_that_has_nobody_to_write_to_ends_as_a_cancelled_one(error: Exception) -> None:
    async def method(*_: object) -> None:
        raise error

    with pytest.raises(asyncio.CancelledError):
        await _with_status(method)(None, None)


async def test_no_method_answers_with_an_exception_s_text(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        for method in ("/pdserve.v1.Generation/Regenerate", "/nobody.v1.Home/Call"):
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary(method)(b"\xff")
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
            _, info = details_of(unknown.value)
            assert (info.reason, method in unknown.value.details()) == ("UNKNOWN_METHOD", True)
            assert info.metadata["request_id"]
        # Streams of messages, too; and methods that are not about requests.
        reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        await reflect.write(b"\xff\xff")
        assert await reflect.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caplog.text

        def broken(_: object) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(cluster.dispatcher.pool, "statuses", broken, raising=True)
        with pytest.raises(grpc.aio.AioRpcError) as bug:
            await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        monkeypatch.undo()
        assert bug.value.code() is grpc.StatusCode.INTERNAL
        _, info = details_of(bug.value)
        assert info.metadata["request_id"] in bug.value.details()
        assert info.metadata["request_id"] in caplog.text
        assert "secret" not in bug.value.details()


async def test_a_bug_is_told_without_details(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        gate = cluster["d0"].hook = Gate("token", index=1)
        call = stub.Generate(build_request([1], Sampling(max_tokens=5), request_id="buggy"))
        await gate.reached.wait()

        def broken(*_: object) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr("router.stream.RequestStream.push", broken)
        gate.opened.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "buggy" in caught.value.details()
        assert "secret" not in caught.value.details()
        await cluster.empty()


# -- health, reflection, status -------------------------------------------------------------------------------------


async def health(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


async def test_health_follows_the_workers(model: Path) -> None:
    async with NullCluster(model, []) as cluster:
        address = cluster.router.address
        assert await health(address) == await health(address, GENERATION) == NOT_SERVING
        with pytest.raises(Unavailable):
            await cluster.client.complete([1])
        async with grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=GENERATION))
            assert (await watch.read()).status == NOT_SERVING
            await cluster.replace(NullWorker("d0", Role.DECODE))
            assert (await watch.read()).status == SERVING
            assert await health(address) == SERVING
            await cluster["d0"].crash()
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()


async def test_reflection_lists_every_service(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:

        def services() -> set[str]:
            with grpc.insecure_channel(cluster.router.address) as channel:
                return set(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert await asyncio.to_thread(services) == {
            GENERATION,
            "pdserve.v1.Admin",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "inference.GRPCInferenceService",
            "grpc.reflection.v1alpha.ServerReflection",
        }


async def test_status(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        await cluster.client.complete([1], Sampling(max_tokens=3))
        status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        assert (status.router_id, status.finished_requests, status.running_requests) == ("router-0", 1, 0)
        assert [(w.worker.worker_id, w.connected, w.problem) for w in status.workers] == [
            ("d0", True, ""),
            ("p0", True, ""),
        ]
        assert status.workers[0].load.total_blocks == 4096
        assert status.model.name == "null"
        assert [(way.mode, way.reason, way.count) for way in status.decisions] == [
            ("disaggregated", "prefill_pool_serves", 1)
        ]
        assert status.degraded == ""


async def test_without_a_prefill_pool_it_serves_degraded_and_says_so(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        await cluster["p0"].crash()
        await until(lambda: cluster.dispatcher.pool.snapshot("p0") is None, "the router knows")
        answer = await cluster.client.complete([1], Sampling(max_tokens=3))
        assert (answer.end.timeline.mode, answer.end.timeline.reason) == ("local", "prefill_pool_empty")
        status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        assert status.degraded == "no prefill worker serves: decode workers run requests as a whole"
        assert [(way.mode, way.reason, way.count) for way in status.decisions] == [("local", "prefill_pool_empty", 1)]


async def test_last_steps_of_every_worker(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        cluster["p0"].hung = True
        reply = await admin_pb2_grpc.AdminStub(channel).GetSteps(worker_pb2.GetStepsRequest(count=3))
        decode, prefill = reply.workers
        assert (decode.worker_id, decode.role, decode.problem) == ("d0", worker_pb2.WORKER_ROLE_DECODE, "")
        assert [step.step for step in decode.steps] == [1, 2, 3]
        assert (prefill.worker_id, len(prefill.steps)) == ("p0", 0)
        assert "nobody is at home" in prefill.problem


async def test_get_model(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        reply = await cluster.client.model()
        assert (reply.model.name, reply.model.max_model_len, reply.model.vocab_size) == ("null", 4096, 512)
        assert reply.has_chat_template
        assert list(reply.end_token_ids) == [257]


async def test_a_worker_that_does_not_fit_is_named_with_both_values(model: Path) -> None:
    other = ModelInfo(name="null", digest="f" * 16, max_model_len=4096, vocab_size=512, dtype="float32")
    misnamed = ModelInfo(name="other", digest="0" * 16, max_model_len=4096, vocab_size=512, dtype="float32")
    async with NullCluster(model, pair()) as cluster:
        for name, wrong in (("d1", other), ("d2", misnamed)):
            cluster.workers[name] = await NullWorker(name, Role.DECODE, model=wrong).start()
        cluster.announce()

        def problems() -> dict[str, str]:
            return {s.worker.worker_id: s.problem for s in cluster.dispatcher.pool.statuses() if not s.connected}

        await until(
            lambda: all("differs" in p for p in problems().values()) and len(problems()) == 2, str(problems())
        )
        assert "f" * 16 in problems()["d1"]
        assert "0" * 16 in problems()["d1"]
        assert "'null'" in problems()["d2"]
        assert "'other'" in problems()["d2"]
        assert (await cluster.client.complete([1], Sampling(max_tokens=2))).end.timeline.decode_worker == "d0"


# -- the controller -------------------------------------------------------------------------------------------------


async def test_the_cluster_serves_on_without_its_controller(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        port = int(cluster.membership.address.rpartition(":")[2])
        await cluster.membership.stop()
        assert (await cluster.client.complete([1], Sampling(max_tokens=3))).token_ids == expected([1], 3)
        # It comes back knowing nobody: the workers have not registered again yet.
        gate = cluster["d0"].hook = Gate("token", index=2)
        running = asyncio.ensure_future(cluster.client.complete([2], Sampling(max_tokens=5)))
        await gate.reached.wait()
        cluster.membership = StaticMembership(port)
        await cluster.membership.start()
        await until(lambda: cluster.membership.watchers > 0, "the router follows the new one")
        await asyncio.sleep(0.2)
        gate.opened.set()
        answer = await running
        assert (answer.token_ids, answer.end.timeline.replays) == (expected([2], 5), 0)
        cluster.workers["d1"] = await NullWorker("d1", Role.DECODE).start()
        cluster.announce()
        await cluster.connected()


async def test_a_worker_that_leaves_the_list_is_dropped(model: Path) -> None:
    async with NullCluster(model, [*pair(), NullWorker("d1", Role.DECODE)]) as cluster:
        gone = cluster.workers.pop("d0")
        cluster.announce()
        await cluster.connected()
        for number in range(3):
            answer = await cluster.client.complete([number], Sampling(max_tokens=2))
            assert answer.end.timeline.decode_worker == "d1"
        await gone.stop()


# -- draining and stopping ------------------------------------------------------------------------------------------


async def test_drain_lets_requests_finish(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        gate = cluster["d0"].hook = Gate("token", index=2)
        running = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=6)))
        await gate.reached.wait()
        draining = asyncio.ensure_future(cluster.router.drain(20.0))
        await until(lambda: cluster.dispatcher.draining, "it drains")
        with pytest.raises(Unavailable):  # test_connections.py has the details
            await cluster.client.complete([1])
        gate.opened.set()
        assert (await running).token_ids == expected([1], 6)
        assert await draining is True
        await cluster.empty()


async def test_drain_ends_what_does_not_finish(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        gate = cluster["d0"].hook = Gate("token", index=2)
        running = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=6), request_id="r"))
        await gate.reached.wait()
        assert await cluster.router.drain(0.1) is False
        with pytest.raises(Unavailable, match="shutting down"):
            await running
        await cluster.empty()
        assert cluster["d0"].commands["abort", "r"] == 1


async def test_stop_ends_everything_and_frees_the_workers(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        gate = cluster["d0"].hook = Gate("token", index=2)
        running = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=6)))
        await gate.reached.wait()
        await cluster.router.stop()
        with pytest.raises(Unavailable):
            await running
        await cluster.empty()
        await cluster.router.stop()  # again changes nothing


async def test_a_taken_port_is_refused(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        config = cluster.router.config
        port = int(cluster.router.address.rpartition(":")[2])
        second = RouterServer(RouterConfig("router-1", config.model_path, "null", config.controller, grpc_port=port))
        words = rf"router\.grpc_port: cannot listen on 127\.0\.0\.1:{port}: the port is in use by another process; "
        with pytest.raises(ConfigError, match=words):
            await second.start()


async def test_a_taken_http_port_is_refused(model: Path) -> None:
    async with NullCluster(model, pair(), http_port=0) as cluster:
        config = cluster.router.config
        port = int(cluster.router.http_address.rpartition(":")[2])
        second = RouterServer(replace(config, router_id="router-1", http_port=port))
        with pytest.raises(ConfigError, match=rf"router\.http_port: cannot listen on 127.0.0.1:{port}: .* in use "):
            await second.start()
        async with grpc.aio.insecure_channel(cluster.router.address) as channel:
            status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        assert status.http_address == cluster.router.http_address


async def test_a_model_folder_without_a_tokenizer(tmp_path: Path) -> None:
    config = RouterConfig("router-1", str(tmp_path), "null", "127.0.0.1:1", grpc_port=0, http_port=0)
    with pytest.raises(ModelError, match="no usable tokenizer"):
        await RouterServer(config).start()


# -- clients --------------------------------------------------------------------------------------------------------


async def test_the_synchronous_client(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:

        def use() -> None:
            with Client(cluster.router.address) as client:
                ids = client.tokenize("hé")
                assert client.detokenize(ids) == "hé"
                chat_ids = client.tokenize([{"role": "user", "content": "x"}])
                assert client.detokenize(chat_ids) == "<user>x\n<assistant>"
                answer = client.complete([{"role": "user", "content": "x"}], Sampling(max_tokens=4))
                assert answer.token_ids == expected(chat_ids, 4)
                assert client.model().model.name == "null"
                assert client.cancel("nobody") is False
                stream = client.generate([1], Sampling(max_tokens=2000), request_id="left")
                next(stream)
                stream.close()
                with pytest.raises(InvalidRequest) as caught:
                    client.complete("")
                assert caught.value.field == "prompt"

        await asyncio.to_thread(use)
        await cluster.empty()
        assert cluster["d0"].commands["abort", "left"] == 1


async def test_the_request_id_is_known_before_the_first_token(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        gate = cluster["p0"].hook = Gate("prefill")
        call = generation_pb2_grpc.GenerationStub(channel).Generate(build_request([1]))
        request_id = dict(await call.initial_metadata())["x-request-id"]
        await gate.reached.wait()
        assert gate.order == [request_id]
        async with AsyncClient(cluster.router.address) as client:
            assert await client.cancel(request_id)
        assert (await call.read()).end.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
