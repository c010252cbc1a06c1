"""What a request of the Open Inference Protocol says comes to the core as by `Generation.Generate`, and so does the
core's answer to its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdcore.errors import Overloaded, RateLimited, RequestError, Unavailable
from protos import generation_pb2, generation_pb2_grpc
from protos import open_inference_pb2 as pb
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from router.open_inference_answer import Send
from router.open_inference_request import _ALIASES, _SAMPLING, _TEXTS
from router.open_inference_stream import MAX_REQUESTS, InferStream
from router.validation import GenerationRequest
from tests.support.null_cluster import NullCluster, pair
from tests.support.tiny_model import tiny_llama

SAMPLING: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.25,
    "min_p": 0.125,
    "seed": 9,
    "n": 2,
    "stop": ["a", "b"],
    "bad_words": ["c"],
    "stop_token_ids": [5, 6],
    "allowed_token_ids": [7, 8],
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 2.0,
    "logit_bias": {10: 1.5},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
FIELDS: dict[str, Any] = {
    "tenant": "acme",
    "kv_codec": "raw",
    "cache_salt": "salt",
    "idempotency_key": "key",
    "priority": generation_pb2.PRIORITY_BATCH,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[NullCluster]:
    async with NullCluster(model, pair()) as cluster:
        yield cluster


@pytest.fixture
async def channel(cluster: NullCluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        yield channel


@pytest.fixture
def checked(cluster: NullCluster, monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """Requests as the core understands them, which are refused then."""
    calls: Any = cluster.router._calls
    check, seen = calls._checked, []

    async def and_refuse(*args: Any) -> None:
        request, _ = await check(*args)
        seen.append(replace(request, request_id=""))
        raise Unavailable("seen")

    monkeypatch.setattr(calls, "_checked", and_refuse)
    return seen


def asking(**parameters: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest()
    text = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"a")
    message.parameters["sampling_parameters"].string_param = json.dumps(parameters)
    return message


def test_these_are_all() -> None:
    assert SAMPLING.keys() == _SAMPLING.keys()
    assert FIELDS.keys() == _TEXTS | {"priority"}
    assert set(_ALIASES.values()) <= SAMPLING.keys()


@pytest.mark.parametrize("name", [*SAMPLING, *FIELDS, *_ALIASES])
async def test_what_is_asked_for_reaches_the_core(
    channel: grpc.aio.Channel, checked: list[GenerationRequest], name: str
) -> None:
    field = _ALIASES.get(name, name)
    value = SAMPLING[field] if field in SAMPLING else FIELDS[field]
    seed: dict[str, Any] = {} if field == "seed" else {"seed": 1}  # or one is drawn
    plain = generation_pb2.GenerateRequest(prompt="a", sampling=generation_pb2.Sampling(**seed))
    wanted = generation_pb2.GenerateRequest(prompt="a", sampling=plain.sampling)
    if field in SAMPLING:
        wanted.sampling.MergeFrom(generation_pb2.Sampling(**{field: value}))
    else:
        setattr(wanted, field, value)
    generate = generation_pb2_grpc.GenerationStub(channel).Generate
    infer = GRPCInferenceServiceStub(channel).ModelInfer
    for message in (wanted, plain):
        with pytest.raises(grpc.aio.AioRpcError, match="seen"):
            await generate(message).read()
    with pytest.raises(grpc.aio.AioRpcError, match="seen"):
        await infer(asking(**seed, **{name: value}))
    by_generate, without, by_infer = checked
    assert by_infer == by_generate
    assert field == "seed" or by_infer != without


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("call_s", "asked_us", "at_most"),
    [(None, 0, None), (500.0, 0, 500.0), (500.0, 90_000_000, 90.0), (None, 10**7, 10.0)],
)
async def test_deadlines_reach_the_core(
    cluster: NullCluster,
    channel: grpc.aio.Channel,
    monkeypatch: pytest.MonkeyPatch,
    streamed: bool,
    call_s: float | None,
    asked_us: int,
    at_most: float | None,
) -> None:
    """That of the call and the request's own `timeout`: the earlier one."""
    seen: list[float | None] = []

    def and_refuse(request: object, texts: object, deadline: float | None) -> None:
        seen.append(None if deadline is None else deadline - arrived)
        raise Unavailable("seen")

    monkeypatch.setattr(cluster.dispatcher, "submit", and_refuse)
    stub, arrived = GRPCInferenceServiceStub(channel), cluster.router._clock.now()
    message = asking(timeout=asked_us)
    if streamed:
        call = stub.ModelStreamInfer(timeout=call_s)
        await call.write(message)
        assert (await call.read()).error_message.startswith("seen")
        call.cancel()
    else:
        with pytest.raises(grpc.aio.AioRpcError, match="seen"):
            await stub.ModelInfer(message, timeout=call_s)
    (left_s,) = seen
    if at_most is None:
        assert left_s is None
    else:
        assert left_s is not None
        assert at_most - 5 < left_s < at_most + 200  # a busy machine's message comes late


@pytest.mark.parametrize(
    ("error", "reason", "retry_after_ms"),
    [
        (Overloaded("full", 2.5), "OVERLOADED", 2500),
        (RateLimited("used up", 0.001), "RATE_LIMITED", 1),
        (Unavailable("gone", None), "UNAVAILABLE", None),
    ],
)
async def test_an_error_on_a_stream_says_why_and_when_to_come_again(
    cluster: NullCluster,
    channel: grpc.aio.Channel,
    monkeypatch: pytest.MonkeyPatch,
    error: RequestError,
    reason: str,
    retry_after_ms: int | None,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(cluster.dispatcher, "submit", refuse)
    call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
    message = asking()
    message.id = "mine"
    await call.write(message)
    answer = await call.read()
    call.cancel()
    told = {
        name: getattr(value, str(value.WhichOneof("parameter_choice")))
        for name, value in answer.infer_response.parameters.items()
    }
    assert told.pop("retry_after_ms", None) == retry_after_ms
    assert told == {"error_reason": reason, "request_id": "mine", "triton_final_response": True}
    assert answer.error_message == f"{error} (request mine)"
    assert answer.infer_response.id == "mine"


class _Eager:
    """The context of a call whose client sends as much as is read. `read_so_far`: messages."""

    def __init__(self) -> None:
        self.read_so_far = 0

    async def read(self) -> pb.ModelInferRequest:
        self.read_so_far += 1
        return pb.ModelInferRequest()

    async def write(self, _: object) -> None:
        await asyncio.sleep(0)


async def test_so_many_requests_of_a_stream_run_and_no_more_are_read() -> None:
    places = asyncio.Semaphore(0)
    running = 0

    async def infer(message: pb.ModelInferRequest, send: Send) -> pb.ModelInferResponse:
        nonlocal running
        running += 1
        await places.acquire()
        running -= 1
        return pb.ModelInferResponse()

    context: Any = _Eager()
    stream = asyncio.ensure_future(InferStream(context, infer, asyncio.Event(), by_status=False).run())
    for ended in (0, 3):
        for _ in range(ended):
            places.release()
        for _ in range(10 * MAX_REQUESTS):
            await asyncio.sleep(0)
        assert (running, context.read_so_far) == (MAX_REQUESTS, MAX_REQUESTS + ended)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
