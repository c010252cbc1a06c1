"""How requests of the Open Inference Protocol end that fail, are cancelled, or lose their client."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdcore.errors import DeadlineExceeded
from protos import open_inference_pb2 as pb
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from router.open_inference_answer import Send
from router.open_inference_stream import InferStream
from router.stream import RequestStream
from tests.support.null_cluster import NullCluster, pair
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[NullCluster]:
    async with NullCluster(model, pair()) as cluster:
        yield cluster


@pytest.fixture
async def stub(cluster: NullCluster) -> AsyncIterator[GRPCInferenceServiceStub]:
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        yield GRPCInferenceServiceStub(channel)


def request(*texts: str, name: str = "", **parameters: int | bool | str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="null", id=name)
    contents = message.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)]).contents
    contents.bytes_contents.extend(text.encode() for text in texts)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    for each, value in parameters.items():
        setattr(message.parameters[each], kinds[type(value)], value)
    return message


def fail_with_unwritten_tokens(cluster: NullCluster, monkeypatch: pytest.MonkeyPatch, request_id: str) -> None:
    """The request ends by its deadline as soon as it has a token, before its reader has taken that."""
    push = RequestStream.push

    def and_fail(stream: RequestStream, *args: Any) -> bool:
        # Before the push, so that it comes before the reader is woken.
        error = DeadlineExceeded("the deadline passed")
        asyncio.get_running_loop().call_soon(cluster.dispatcher.abandon, request_id, error)
        return push(stream, *args)

    monkeypatch.setattr(RequestStream, "push", and_fail)


async def test_an_error_that_meets_unwritten_tokens_keeps_its_status(
    cluster: NullCluster, stub: GRPCInferenceServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with_unwritten_tokens(cluster, monkeypatch, "late")
    with pytest.raises(grpc.aio.AioRpcError, match="the deadline passed") as whole:
        await stub.ModelInfer(request("a", name="late", max_tokens=50))
    assert whole.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    call = stub.ModelStreamInfer()
    await call.write(request("a", name="late", max_tokens=50, stream=True, return_finish_reason=True))
    answers = [await call.read(), await call.read()]
    tokens, error = answers
    by_name = {output.name: output.contents.bytes_contents for output in tokens.infer_response.outputs}
    assert (tokens.error_message, list(by_name["finish_reason"])) == ("", [b"None"])
    assert error.error_message.startswith("the deadline passed")
    assert error.infer_response.parameters["error_reason"].string_param == "DEADLINE_EXCEEDED"
    assert [a.infer_response.parameters["triton_final_response"].bool_param for a in answers] == [False, True]
    call.cancel()
    await cluster.empty()


class _Context:
    """Of a call that has one message, and takes answers until it is told to fail."""

    def __init__(self) -> None:
        self.messages = [request("a")]
        self.writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wrote = asyncio.Event()

    async def read(self) -> Any:
        if self.messages:
            return self.messages.pop()
        await asyncio.Event().wait()

    async def write(self, _: object) -> None:
        self.wrote.set()
        await self.writing


@pytest.mark.parametrize("impatient", [False, True])
async def test_a_write_that_fails_once_its_stream_is_cancelled_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture, impatient: bool
) -> None:
    """Nobody read how it had ended, and asyncio said so, with a traceback. `impatient`: cancelled twice."""

    async def infer(message: pb.ModelInferRequest, send: Send) -> pb.ModelInferResponse:
        return pb.ModelInferResponse()

    context = _Context()
    stream = InferStream(context, infer, asyncio.Event(), by_status=False)
    running = asyncio.ensure_future(stream.run())
    await context.wrote.wait()
    for _ in range(1 + impatient):
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    context.writing.set_exception(grpc.aio.InternalError("Failed 'execute_batch'"))
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0)
    del running, stream, context
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


async def test_what_fails_on_a_stream_is_in_the_log_under_its_id(
    stub: GRPCInferenceServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.guard")
    call = stub.ModelStreamInfer()
    for name in ("mine", ""):
        await call.write(request("a", name=name, max_tokens=0))
        told = (await call.read()).infer_response.parameters["request_id"].string_param
        assert name in ("", told)
        assert f"request {told} fails: INVALID_REQUEST" in caplog.text
    call.cancel()
