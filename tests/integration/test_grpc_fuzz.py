"""Whatever comes by gRPC: no INTERNAL or UNKNOWN, no hang, nothing left behind. By hypothesis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from protos import admin_pb2, generation_pb2, open_inference_pb2
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.tiny_model import tiny_llama

EXAMPLES = 400
CALL_S = 0.5
"""The deadline of each call: some of what is generated is a good request, with thousands of tokens."""
METHODS: list[MethodDescriptor] = [
    method
    for file in (generation_pb2, admin_pb2, open_inference_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
WORDS = st.sampled_from(
    ["", "x", "null", "hello", "text_input", "BYTES", "BOOL", "FP32", "stream", "max_tokens", "user", "{}", "["]
)
Field = FieldDescriptor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("fuzz"))


def scalar(field: Field) -> st.SearchStrategy[Any]:
    if field.cpp_type == Field.CPPTYPE_ENUM:
        return st.integers(0, 7)
    if field.cpp_type == Field.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return st.sampled_from([0.0, 0.5, 1.0, -1.0, 3e38]) | st.floats(width=32)
    if field.type == Field.TYPE_BYTES:
        return st.binary(max_size=12) | WORDS.map(str.encode)
    if field.type == Field.TYPE_STRING:
        return WORDS | st.text(st.characters(codec="utf-8"), max_size=12)
    bits = 32 if field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32) else 64
    unsigned = field.cpp_type in (Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64)
    least, most = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.integers(0, 9) | st.integers(least, most)


def fill(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any], depth: int = 0) -> None:
    """Set some of the fields, to anything that their types allow."""
    fields = list(message.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), unique_by=lambda f: f.number, max_size=5)) if fields else ():
        of = field.message_type
        if of is not None and of.GetOptions().map_entry:
            target, value = getattr(message, field.name), of.fields_by_name["value"]
            for key in draw(st.lists(scalar(of.fields_by_name["key"]), max_size=2)):
                if value.message_type is None:
                    target[key] = draw(scalar(value))
                else:
                    fill(target[key], draw, depth + 1)
        elif of is not None and depth < 4:
            target = getattr(message, field.name)
            for each in [target.add() for _ in range(draw(st.integers(0, 2)))] if field.is_repeated else [target]:
                each.SetInParent()
                fill(each, draw, depth + 1)
        elif of is None and field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalar(field), max_size=4)))
        elif of is None:
            setattr(message, field.name, draw(scalar(field)))


@st.composite
def calls(draw: Any) -> tuple[MethodDescriptor, list[bytes]]:
    """A method, and what is sent to it: messages of its type, some of them damaged."""
    method = draw(st.sampled_from(METHODS))
    sent = []
    for _ in range(draw(st.integers(1, 3)) if method.client_streaming else 1):
        message = message_factory.GetMessageClass(method.input_type)()
        fill(message, draw)
        data = message.SerializeToString()
        match draw(st.integers(0, 9)):
            case 0:
                data = draw(st.binary(max_size=40))
            case 1:
                data = data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=4))
        sent.append(data)
    return method, sent


def examples(number: int) -> list[tuple[MethodDescriptor, list[bytes]]]:
    found: list[tuple[MethodDescriptor, list[bytes]]] = []

    @seed(1)
    @settings(max_examples=number, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(calls())
    def collect(call: tuple[MethodDescriptor, list[bytes]]) -> None:
        found.append(call)

    collect()
    return found


async def status(channel: grpc.aio.Channel, method: MethodDescriptor, sent: list[bytes]) -> grpc.StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        call = channel.stream_stream(path)(timeout=CALL_S)
        try:
            for data in sent:
                await call.write(data)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has ended: its status says why
    elif method.server_streaming:
        call = channel.unary_stream(path)(sent[0], timeout=CALL_S)
    else:
        call = channel.unary_unary(path)(sent[0], timeout=CALL_S)
        return await call.code()
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code()


async def test_the_grpc_interface_stands_fuzzing(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = await asyncio.to_thread(examples, EXAMPLES)
    seen: dict[grpc.StatusCode, int] = {}
    with caplog.at_level(logging.WARNING):
        async with (
            NullCluster(model, pair()) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            turns = asyncio.Semaphore(16)

            async def one(method: MethodDescriptor, sent: list[bytes]) -> None:
                async with turns, asyncio.timeout(20.0):
                    code = await status(channel, method, sent)
                seen[code] = seen.get(code, 0) + 1
                assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (method.full_name, sent)

            async with asyncio.TaskGroup() as group:
                for method, sent in made:
                    group.create_task(one(method, sent))
            await cluster.empty()
            await until(lambda: not cluster.dispatcher.request_ids, "no request is left")
            assert (await cluster.client.complete([3, 4, 5])).finish_reason == "length"
    assert seen[grpc.StatusCode.OK] > 20
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 20
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
