"""Whatever comes by gRPC: no INTERNAL or UNKNOWN, no hang, nothing left behind. By hypothesis."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from protos import admin_pb2, generation_pb2, open_inference_pb2
from router.reflection import SERVICES as REFLECTION
from router.wire_errors import REQUEST_ID_METADATA
from tests.support.null_cluster import COUNTED, NullCluster, pair, tasks
from tests.support.tiny_model import tiny_llama

EXAMPLES = 400
CALL_S = 60.0
"""The deadline of each call, for a busy machine: whatever takes longer hangs."""
MAX_TOKENS = 8
"""Of requests that name no number. Others name a small one, or one that is refused."""
METHODS: dict[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method
    for file in (generation_pb2, admin_pb2, open_inference_pb2, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
} | {
    f"{version}/{method.name}": method  # v1 has the messages of v1alpha
    for version in REFLECTION
    for method in reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods
}
GENERATE = "pdserve.v1.Generation/Generate"
WATCH = "grpc.health.v1.Health/Watch"
"""Without an end: it is left after the first answer."""
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
def calls(draw: Any) -> tuple[str, list[bytes]]:
    """A method, and what is sent to it: messages of its type, some of them damaged."""
    path = draw(st.sampled_from(sorted(METHODS)))
    method = METHODS[path]
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
    return path, sent


def examples(number: int) -> list[tuple[str, list[bytes]]]:
    found: list[tuple[str, list[bytes]]] = []

    @seed(1)
    @settings(max_examples=number, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(calls())
    def collect(call: tuple[str, list[bytes]]) -> None:
        found.append(call)

    collect()
    return found


def good(number: int) -> bytes:
    """A request that runs, with a key that others have as well, and a tenant."""
    request = generation_pb2.GenerateRequest(
        prompt="hello", idempotency_key=f"k{number % 5}", tenant=f"t{number % 2}"
    )
    return request.SerializeToString()


async def status(channel: grpc.aio.Channel, path: str, sent: list[bytes], *, leave: bool) -> grpc.StatusCode | None:
    """How a call ended, which is left after its first answer if `leave`.

    None if the client lost that: it ends a call by itself, as INTERNAL and without what the server said, if that has
    ended the call while the client was still writing.
    """
    method = METHODS[path]
    if method.client_streaming:
        call = channel.stream_stream(f"/{path}")(timeout=CALL_S)
        try:
            for data in sent:
                await call.write(data)
            await call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            pass  # it has ended: its status says why
    elif method.server_streaming:
        call = channel.unary_stream(f"/{path}")(sent[0], timeout=CALL_S)
    else:
        call = channel.unary_unary(f"/{path}")(sent[0], timeout=CALL_S)
    if method.server_streaming:
        try:
            while await call.read() is not grpc.aio.EOF:
                if leave:
                    call.cancel()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
    code = await call.code()
    if code is grpc.StatusCode.INTERNAL and await call.details() == "Internal error from Core":
        ours = any(key == REQUEST_ID_METADATA for key, _ in await call.trailing_metadata() or ())
        return code if ours else None
    return code


async def test_the_grpc_interface_stands_fuzzing(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = await asyncio.to_thread(examples, EXAMPLES)
    assert {path for path, _ in made} == set(METHODS)
    seen: Counter[grpc.StatusCode | None] = Counter()
    bad = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
    with caplog.at_level(logging.WARNING):
        async with (
            NullCluster(model, pair(), default_max_tokens=MAX_TOKENS, tenants=COUNTED) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            before = tasks()
            turns = asyncio.Semaphore(16)

            async def one(path: str, sent: list[bytes], *, leave: bool) -> None:
                async with turns, asyncio.timeout(2 * CALL_S):
                    code = await status(channel, path, sent, leave=leave)
                seen[code] += 1
                assert code not in bad, (code, path, sent)

            async with asyncio.TaskGroup() as group:
                for path, sent in made:
                    group.create_task(one(path, sent, leave=path == WATCH))
                for number in range(60):
                    group.create_task(one(GENERATE, [good(number)], leave=number % 2 > 0))
            await cluster.at_rest(before)
            assert len(cluster.dispatcher.admission.tenants) > 1, "tenants were counted"
            assert (await cluster.client.complete([3, 4, 5])).finish_reason == "length"
    assert seen[grpc.StatusCode.OK] > 20
    assert seen[grpc.StatusCode.ALREADY_EXISTS] > 0
    assert seen[grpc.StatusCode.CANCELLED] > 5 + sum(path == WATCH for path, _ in made), "good ones were left, too"
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 20
    assert seen[None] < 20
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
