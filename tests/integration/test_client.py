"""The Python client: streams, whole answers, endings, tries, and what its errors carry."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status

from pdcore.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    RequestError,
    Unavailable,
)
from protos import generation_pb2, generation_pb2_grpc
from router.client import AsyncClient, Client, Retry, Sampling, build_request
from router.wire_errors import status_of
from tests.support.null_cluster import NullCluster, pair
from tests.support.tiny_model import tiny_llama

Event = generation_pb2.GenerateEvent
END = generation_pb2.End(finish_reason=generation_pb2.FINISH_REASON_LENGTH)
QUICK = Retry(attempts=4, max_wait_s=5.0, first_wait_s=0.01)


class Scripted(generation_pb2_grpc.GenerationServicer):
    """Fails with `errors` in turn, then answers with `events`. `waits`: for as long as its callers let it."""

    def __init__(self) -> None:
        self.errors: list[RequestError] = []
        self.events = [Event(text="a", token_ids=[1]), Event(text="b", token_ids=[2], token_index=1), Event(end=END)]
        self.waits = False
        self.ids: list[str] = []
        self.ended = threading.Semaphore(0)

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.errors:
            context.abort_with_status(rpc_status.to_status(status_of(self.errors.pop(0))))

    def Generate(self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        self.ids.append(request.request_id)
        gone = threading.Event()
        context.add_callback(gone.set)
        if self.waits:
            context.add_callback(self.ended.release)
        self._fail(context)
        yield from self.events
        if self.waits:
            gone.wait(20)

    def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> generation_pb2.DetokenizeReply:
        self.ids.append("detokenize")
        self._fail(context)
        return generation_pb2.DetokenizeReply(text="text")


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    service = Scripted()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(0).wait(5)


# -- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_is_read_in_part_and_collected_whole(scripted: tuple[Scripted, str]) -> None:
    _, address = scripted
    with Client(address) as client, client.generate("x", request_id="r") as stream:
        assert stream.request_id == "r"
        assert next(stream).text == "a"
        answer = stream.collect()
        assert (answer.text, answer.token_ids, answer.request_id) == ("ab", (1, 2), "r")
        assert answer.finish_reason == "length"
        assert stream.collect() == answer, "again, with nothing left to read"
        assert list(stream) == []


def test_the_id_is_known_before_anything_comes(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    with Client(address) as client:
        stream = client.generate("x")
        assert stream.request_id
        assert not service.ids, "it begins with the first event"
        stream.collect()
        assert service.ids == [stream.request_id]
        assert client.generate("x").request_id != stream.request_id


def test_leaving_a_stream_ends_its_request(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.waits, service.events = True, service.events[:1]
    with Client(address) as client:
        for _ in client.generate("x"):
            break
        assert service.ended.acquire(timeout=10), "the loop was left"
        with client.generate("x") as stream:
            next(stream)
        assert service.ended.acquire(timeout=10), "closed"
        stream = client.generate("x")
        next(stream)
        del stream
        gc.collect()
        assert service.ended.acquire(timeout=10), "nobody holds it"
        stream = client.generate("x")
        next(stream)
    assert service.ended.acquire(timeout=10), "the client was closed"
    with pytest.raises(RequestCancelled):
        stream.collect()


def test_cancel_from_another_thread(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.waits, service.events = True, service.events[:1]
    with Client(address) as client:
        stream = client.generate("x")
        next(stream)
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        with pytest.raises(RequestCancelled) as caught:
            stream.collect()
        timer.join()
        assert caught.value.request_id == stream.request_id
        assert service.ended.acquire(timeout=10)
        early = client.generate("x")
        early.cancel()
        with pytest.raises(RequestCancelled):
            next(early)


async def test_cancel_of_an_asynchronous_stream(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.waits, service.events = True, service.events[:1]
    async with AsyncClient(address) as client:
        stream = client.generate("x")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(RequestCancelled) as caught:
            await stream.collect()
        assert caught.value.request_id == stream.request_id
        async with client.generate("x") as left:
            async for _ in left:
                break
        # The task that reads is cancelled, which is something else than the stream.
        reader = asyncio.ensure_future(client.complete("x"))
        await asyncio.sleep(0.1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    for _ in range(3):
        assert await asyncio.to_thread(service.ended.acquire, timeout=10)


def test_half_an_answer_is_none(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.events = service.events[:2]
    with Client(address) as client, pytest.raises(InternalError, match="0 of 1 answers"):
        client.complete("x")


def test_several_samples(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.events = [
        Event(sample=1, text="one"),
        Event(sample=0, text="zero", end=END),
        Event(sample=1, text="!", end=END),
    ]
    with Client(address) as client:
        two = Sampling(n=2)
        assert [answer.text for answer in client.samples("x", two)] == ["zero", "one!"]
        with pytest.raises(ValueError, match="`samples` returns them all"):
            client.complete("x", two)
        with pytest.raises(ValueError, match="`samples` returns them all"):
            client.generate("x", two).collect()


# -- tries ----------------------------------------------------------------------------------------------------------


def test_overload_is_waited_out_if_asked_for(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.errors = [Overloaded("full", 0.02), Unavailable("draining", 0.02), Overloaded("full", 0.02)]
    with Client(address, retry=QUICK) as client:
        stream = client.generate("x")
        assert stream.collect().text == "ab"
        assert service.ids == [stream.request_id] * 4
        service.errors = [Overloaded("full", 0.02)]
        assert client.detokenize([1]) == "text"
        assert service.ids[4:] == ["detokenize"] * 2


async def test_the_asynchronous_client_tries_again_as_well(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.errors = [Overloaded("full", 0.02), Unavailable("draining", 0.02)]
    async with AsyncClient(address, retry=QUICK) as client:
        assert (await client.complete("x")).text == "ab"
        service.errors = [Unavailable("draining", 0.02)]
        assert await client.detokenize([1]) == "text"
        service.errors = [Overloaded("full", 3.0)] * 9
        stream = client.generate("x")
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        with pytest.raises(RequestCancelled):
            await anext(stream)
    assert len(service.ids) == 3 + 2 + 1


def test_tries_end(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.errors = [Overloaded("full", 0.02) for _ in range(9)]
    with Client(address, retry=QUICK) as client:
        with pytest.raises(Overloaded) as caught:
            client.complete("x", request_id="r")
        assert (caught.value.retry_after_s, caught.value.request_id, len(service.ids)) == (0.02, "r", 4)
        service.errors = [Overloaded("full", 60.0)]
        with pytest.raises(Overloaded):
            client.complete("x")
        service.errors = [Overloaded("full", 3.0)]
        with pytest.raises(Overloaded):  # at once, not after the deadline
            client.complete("x", timeout_s=2.0)
        service.errors = [Overloaded("full", 3.0)]
        stream = client.generate("x")
        timer = threading.Timer(0.1, stream.cancel)
        timer.start()
        with pytest.raises(RequestCancelled):
            next(stream)
        timer.join()
    assert len(service.ids) == 4 + 3


def test_nothing_is_tried_again_unless_asked_for_or_once_something_has_come(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    service.errors = [Overloaded("full", 0.0)]
    with Client(address) as client, pytest.raises(Overloaded):
        client.complete("x")
    service.errors = [InvalidRequest("prompt", "is bad")]
    with Client(address, retry=QUICK) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.complete("x")
        assert caught.value.request_id == service.ids[-1]
        assert service.ids[-1] in caught.value.__notes__[0], "shown by a traceback"
        service.events = service.events[:1]  # and then nothing
        with pytest.raises(InternalError):
            client.complete("x")
    assert len(service.ids) == 3


# -- against a router ----------------------------------------------------------------------------------------------


async def test_a_real_router_knows_the_client_s_ids(tmp_path: Path) -> None:
    async with NullCluster(tiny_llama(tmp_path), pair(step_s=0.01)) as cluster:
        async with cluster.client.generate("x", Sampling(max_tokens=500)) as stream:
            event = await anext(stream)
            assert event.request_id == stream.request_id
            assert await cluster.client.cancel(stream.request_id)
            assert (await stream.collect()).finish_reason == "cancelled"
        with pytest.raises(InvalidRequest) as caught:
            await cluster.client.complete([1], Sampling(temperature=9))
        assert caught.value.request_id
        await cluster.empty()


def test_a_prompt_may_be_a_whole_chat() -> None:
    chat = generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role="user", content="x")], tools=[generation_pb2.Tool(name="f")]
    )
    assert build_request(chat).chat == chat
    result = {"role": "tool", "content": "4", "name": "f", "tool_call_id": "c1"}
    (message,) = build_request([result]).chat.messages
    assert (message.role, message.content, message.name, message.tool_call_id) == tuple(result.values())


def test_what_is_easily_mistaken_is_refused() -> None:
    with pytest.raises(ValueError, match="got tool_calls"):
        build_request([{"role": "assistant", "content": "", "tool_calls": []}])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="stop: a sequence"):
        Sampling(stop="\n")
    with pytest.raises(ValueError, match="interactive, standard, batch"):
        build_request("x", priority="urgent")  # type: ignore[arg-type]
