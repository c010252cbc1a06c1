"""Typed clients of the public API, synchronous and asynchronous.

::

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("Once upon a time", Sampling(max_tokens=32)):
            print(event.text, end="", flush=True)

        answer = client.complete([{"role": "user", "content": "Why is the sky blue?"}], timeout_s=30)
        print(answer.text, answer.finish_reason, answer.end.usage.cached_tokens)

Failures raise the errors of `pdcore.errors`, which carry the id of the request::

    try:
        client.complete("Once upon a time", Sampling(temperature=9.0))
    except InvalidRequest as error:  # names the field
        print(error.field, error.problem, error.request_id)
    except Overloaded as error:  # says when to come again, in seconds
        print(error.retry_after_s)

A client made with ``retry=Retry()`` comes again by itself, within bounds. Where the cluster has API keys, give one as
`api_key`; where it has TLS, `tls`, or an address with ``https://``.

With several routers (``"a:50051,b:50051"``) calls begin at each in turn. One that is unavailable gives way to the
next, until the first event of an answer has come; one that drains is asked last for a few seconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Unpack

import grpc

from pdcore.api_key import key_metadata
from pdcore.errors import RequestError
from pdcore.security import ClientTls
from protos import generation_pb2, generation_pb2_grpc
from router.channels import client_options
from router.client_messages import (
    Messages,
    Priority,
    Prompt,
    RequestOptions,
    Sampling,
    build_request,
    tokenize_request,
)
from router.client_retry import NEVER, Retry
from router.client_stream import AsyncStream, Completion, Event, Progress, Stream, finish_reason_name
from router.client_tries import Tries
from router.failover import Rotation, bounded
from router.wire_errors import error_of
from security.client import aio_client_channels, client_channels

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Event",
    "Messages",
    "Priority",
    "Prompt",
    "RequestOptions",
    "Retry",
    "Sampling",
    "Stream",
    "build_request",
    "finish_reason_name",
]

MAX_MESSAGE_BYTES = 16 << 20
READ_AHEAD_BYTES = 64 << 10


def _new_request(
    prompt: Prompt, sampling: Sampling | None, request: RequestOptions
) -> tuple[generation_pb2.GenerateRequest, int]:
    """The message, which has an id, and how many samples it asks for."""
    message = build_request(prompt, sampling, **request)
    # Known before anything has come back, so that every error can carry it.
    message.request_id = message.request_id or uuid.uuid4().hex
    return message, sampling.n if sampling is not None and sampling.n is not None else 1


def _one(sampling: Sampling | None) -> None:
    if sampling is not None and sampling.n not in (None, 1):
        raise ValueError(f"n is {sampling.n}: `samples` returns them all")


class Client:
    """Synchronous client; thread-safe. `timeout_s` of a call is its deadline, which the cluster honours.

    Args:
        address: ``host:port`` of a router; several separated by commas, or a sequence of them. Without a port it is
            50051. With ``https://`` before it, calls are encrypted. ValueError is raised for what is no address.
        api_key: says whose the requests are, where the cluster has keys. It travels as it is: without TLS use it on
            networks that you trust.
        tls: encrypts, with these authorities, and this certificate if there is one. None: plain text, unless the
            address says otherwise. ConfigError is raised for files that are not right.
        retry: whether and how long calls come again that were refused for want of room or of workers; default: not.
        read_ahead_bytes: what a router may send of one stream before it is read here.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str = "",
        retry: Retry = NEVER,
        tls: ClientTls | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self._metadata = key_metadata(api_key)
        self._retry = retry
        options = client_options(MAX_MESSAGE_BYTES, read_ahead_bytes)
        self._channels = client_channels(address, tls, options)
        self._stubs = Rotation([generation_pb2_grpc.GenerationStub(channel) for channel in self._channels])

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls: who reads gets RequestCancelled, and so does who calls later.

        A call that waits for its next try (see `Retry`) ends when it would be made.
        """
        self._stubs.close()
        for channel in self._channels:
            channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        timeout_s: float | None = None,
        **request: Unpack[RequestOptions],
    ) -> Stream:
        """Stream events; the last one of each sample has `end`. Leaving the loop early cancels the request.

        ::

            with client.generate(prompt, Sampling(max_tokens=64), timeout_s=30, priority="batch") as stream:
                for event in stream:
                    print(event.text, end="", flush=True)
            print(stream.request_id, stream.collect().finish_reason)

        Args:
            timeout_s: seconds that the whole answer may take, tries included; None for no bound, as is infinity.
            request: see `RequestOptions`.

        Raises ValueError for what the message cannot carry, or a timeout that is none; reading raises the errors of
        `pdcore.errors`. Their `request_id` is the stream's, unless the router did not get that far as to read it, or
        refuses it: then it is the one that the router has given.
        """
        message, samples = _new_request(prompt, sampling, request)
        progress = Progress(message.request_id, samples, threading.Event())
        return Stream(self._events(message, bounded(timeout_s), progress), progress)

    def _events(
        self, message: generation_pb2.GenerateRequest, timeout_s: float | None, progress: Progress[threading.Event]
    ) -> Generator[Event, None, None]:
        tries = Tries(self._retry, timeout_s, progress.failed)
        while True:
            try:
                for stub, last in self._stubs.take():
                    call = self._invoke(stub.Generate, message, tries.deadline.left_s)
                    progress.began(call)
                    try:
                        for event in call:
                            yield progress.add(event)
                        progress.check_complete()
                        return
                    except grpc.RpcError as error:
                        self._stubs.failed(stub, error, progress.begun or last)
                    finally:
                        call.cancel()
            except RequestError as error:
                wait = tries.wait_s(error, final=progress.begun)
            if progress.cancelled.wait(wait):
                raise progress.was_cancelled()

    def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        timeout_s: float | None = None,
        **request: Unpack[RequestOptions],
    ) -> Completion:
        """The whole answer; arguments as for `generate`. Raises ValueError for several samples: see `samples`."""
        _one(sampling)
        return self.generate(prompt, sampling, timeout_s=timeout_s, **request).collect()

    def samples(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        timeout_s: float | None = None,
        **request: Unpack[RequestOptions],
    ) -> list[Completion]:
        """All ``sampling.n`` samples of the answer; arguments as for `generate`."""
        return self.generate(prompt, sampling, timeout_s=timeout_s, **request).samples()

    def cancel(self, request_id: str, timeout_s: float = 10.0) -> bool:
        """End a running request, on whichever router it is; False if there is none with this id.

        Its stream ends as usual, with finish reason ``cancelled``. Raises Unavailable if it was not found, and not
        every router answered.
        """
        request, silent = generation_pb2.CancelRequest(request_id=request_id), None
        for stub, _ in self._stubs.take():
            try:
                if self._invoke(stub.Cancel, request, bounded(timeout_s)).found:
                    return True
            except grpc.RpcError as error:
                self._stubs.check_open()
                silent = error
        if silent is not None:
            raise error_of(silent) from silent
        return False

    def model(self, timeout_s: float = 10.0) -> generation_pb2.GetModelReply:
        """What is served."""
        request = generation_pb2.GetModelRequest()
        reply: generation_pb2.GetModelReply = self._call("GetModel", request, timeout_s)
        return reply

    def tokenize(
        self, prompt: str | Messages | generation_pb2.Chat, *, model: str = "", timeout_s: float = 10.0
    ) -> list[int]:
        """Token ids of a text or of chat messages."""
        reply = self._call("Tokenize", tokenize_request(prompt, model), timeout_s)
        return list(reply.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0) -> str:
        """Text of token ids, special ones skipped."""
        request = generation_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._call("Detokenize", request, timeout_s).text)

    def _call(self, method: str, request: object, timeout_s: float) -> Any:
        tries = Tries(self._retry, timeout_s)
        while True:
            try:
                for stub, last in self._stubs.take():
                    try:
                        return self._invoke(getattr(stub, method), request, tries.deadline.left_s)
                    except grpc.RpcError as error:
                        self._stubs.failed(stub, error, last)
            except RequestError as error:
                wait = tries.wait_s(error)
            time.sleep(wait)

    def _invoke(self, method: Any, request: object, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError:  # as gRPC has it where another thread has just closed the channel
            self._stubs.check_open()
            raise


class AsyncClient:
    """`Client` for asyncio; to be made and used on one event loop.

    ::

        async with AsyncClient("127.0.0.1:50051", retry=Retry()) as client:
            async with client.generate("Once upon a time") as stream:
                async for event in stream:
                    print(event.text, end="", flush=True)
            answers = await asyncio.gather(*(client.complete(prompt) for prompt in prompts))
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str = "",
        retry: Retry = NEVER,
        tls: ClientTls | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self._metadata = key_metadata(api_key)
        self._retry = retry
        options = client_options(MAX_MESSAGE_BYTES, read_ahead_bytes)
        self._channels = aio_client_channels(address, tls, options)
        self._stubs: Rotation[Any] = Rotation(
            [generation_pb2_grpc.GenerationStub(channel) for channel in self._channels]
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`."""
        self._stubs.close()
        for channel in self._channels:
            await channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        timeout_s: float | None = None,
        **request: Unpack[RequestOptions],
    ) -> AsyncStream:
        """See `Client.generate`, and `AsyncStream` for how to leave the loop early."""
        message, samples = _new_request(prompt, sampling, request)
        progress = Progress(message.request_id, samples, asyncio.Event())
        return AsyncStream(self._events(message, bounded(timeout_s), progress), progress)

    async def _events(
        self, message: generation_pb2.GenerateRequest, timeout_s: float | None, progress: Progress[asyncio.Event]
    ) -> AsyncGenerator[Event, None]:
        tries = Tries(self._retry, timeout_s, progress.failed)
        while True:
            try:
                for stub, last in self._stubs.take():
                    call = stub.Generate(message, timeout=tries.deadline.left_s, metadata=self._metadata)
                    progress.began(call)
                    try:
                        async for event in call:
                            yield progress.add(event)
                        progress.check_complete()
                        return
                    except grpc.RpcError as error:
                        self._stubs.failed(stub, error, progress.begun or last)
                    except asyncio.CancelledError:  # of the call, unless it is of this task
                        if _task_is_cancelled():
                            raise
                        self._stubs.check_open()
                        if not progress.cancelled.is_set():
                            raise
                        raise progress.was_cancelled() from None
                    finally:
                        call.cancel()
            except RequestError as error:
                wait = tries.wait_s(error, final=progress.begun)
            if await _set_within(progress.cancelled, wait):
                raise progress.was_cancelled()

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        timeout_s: float | None = None,
        **request: Unpack[RequestOptions],
    ) -> Completion:
        """See `Client.complete`."""
        _one(sampling)
        async with self.generate(prompt, sampling, timeout_s=timeout_s, **request) as stream:
            return await stream.collect()

    async def samples(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        timeout_s: float | None = None,
        **request: Unpack[RequestOptions],
    ) -> list[Completion]:
        """See `Client.samples`."""
        async with self.generate(prompt, sampling, timeout_s=timeout_s, **request) as stream:
            return await stream.samples()

    async def cancel(self, request_id: str, timeout_s: float = 10.0) -> bool:
        """See `Client.cancel`."""
        request, silent = generation_pb2.CancelRequest(request_id=request_id), None
        for stub, _ in self._stubs.take():
            try:
                if (await self._invoke(stub.Cancel, request, bounded(timeout_s))).found:
                    return True
            except grpc.RpcError as error:
                self._stubs.check_open()
                silent = error
        if silent is not None:
            raise error_of(silent) from silent
        return False

    async def model(self, timeout_s: float = 10.0) -> generation_pb2.GetModelReply:
        """See `Client.model`."""
        reply: generation_pb2.GetModelReply = await self._call(
            "GetModel", generation_pb2.GetModelRequest(), timeout_s
        )
        return reply

    async def tokenize(
        self, prompt: str | Messages | generation_pb2.Chat, *, model: str = "", timeout_s: float = 10.0
    ) -> list[int]:
        """See `Client.tokenize`."""
        reply = await self._call("Tokenize", tokenize_request(prompt, model), timeout_s)
        return list(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0) -> str:
        """See `Client.detokenize`."""
        request = generation_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        reply = await self._call("Detokenize", request, timeout_s)
        return str(reply.text)

    async def _call(self, method: str, request: object, timeout_s: float) -> Any:
        tries = Tries(self._retry, timeout_s)
        while True:
            try:
                for stub, last in self._stubs.take():
                    try:
                        return await self._invoke(getattr(stub, method), request, tries.deadline.left_s)
                    except grpc.RpcError as error:
                        self._stubs.failed(stub, error, last)
            except RequestError as error:
                wait = tries.wait_s(error)
            await asyncio.sleep(wait)

    async def _invoke(self, method: Any, request: object, timeout_s: float | None) -> Any:
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except asyncio.CancelledError:  # of the call, by `close`, unless it is of this task
            if not _task_is_cancelled():
                self._stubs.check_open()
            raise


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
