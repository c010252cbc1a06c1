"""One ModelStreamInfer call: requests come, and each is answered as it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pdcore.errors import Draining, RequestError
from protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from router.calls import ClientGone
from router.guard import bug, note
from router.open_inference_answer import FINAL, VERSION, Send
from router.open_inference_request import parameter
from router.validation import new_request_id
from router.wire_errors import words_of

MAX_REQUESTS = 256
"""That run on one stream; no more are read from it meanwhile."""

Infer = Callable[[ModelInferRequest, Send], Awaitable[ModelInferResponse | None]]


class InferStream:
    """Reads requests until the client has no more, or the router drains, and answers them side by side.

    An error of one request is a message of its own, as Triton's clients expect, and the others go on.

    Args:
        infer: runs a request. Its answer is sent by what it is given, or is what it returns.
        draining: set once nothing new is to be begun.
        by_status: an error ends the stream, and is its status.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext, infer: Infer, draining: asyncio.Event, *, by_status: bool
    ) -> None:
        self._context = context
        self._infer = infer
        self._draining = draining
        self._by_status = by_status
        self._turn = asyncio.Lock()  # of writing: grpc.aio allows one at a time
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Raises what ends the stream early: RequestError, Draining once what ran has been answered, ClientGone."""
        reading: asyncio.Task[Any] | None = None
        draining = asyncio.ensure_future(self._draining.wait())
        over = False
        try:
            while not over or self._running:
                if not over and reading is None and len(self._running) < MAX_REQUESTS:
                    reading = asyncio.ensure_future(self._context.read())
                waits: set[asyncio.Future[Any]] = set(self._running)
                if not over:
                    waits |= {draining} if reading is None else {draining, reading}
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in done & self._running:
                    self._running.discard(task)
                    task.result()
                if reading is not None and reading in done:
                    message, reading = reading.result(), None
                    if message is grpc.aio.EOF:
                        over = True
                    else:
                        self._running.add(asyncio.ensure_future(self._answer(message)))
                over = over or self._draining.is_set()
            if self._draining.is_set():
                raise Draining("the router is draining: open a new stream, which another router takes")
        finally:
            tasks = [task for task in (*self._running, draining, reading) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, message: ModelInferRequest) -> None:
        try:
            response = await self._infer(message, self._send)
        except RequestError as error:
            if self._by_status:
                raise
            await self._fail(message, error)
        except ClientGone:
            raise
        except Exception as error:  # a client must not see what it is
            failure = bug(error, new_request_id())
            if self._by_status:
                raise failure from error
            await self._fail(message, failure)
        else:
            if response is not None:
                response.parameters[FINAL].CopyFrom(parameter(True))
                await self._send(response)

    async def _send(self, response: ModelInferResponse) -> None:
        await self._write(ModelStreamInferResponse(infer_response=response))

    async def _fail(self, message: ModelInferRequest, error: RequestError) -> None:
        note(error, error.request_id)
        response = ModelInferResponse(model_name=message.model_name, model_version=VERSION, id=message.id)
        told: dict[str, bool | int | str] = {
            FINAL: True,
            "request_id": error.request_id,
            "error_reason": error.reason,
        }
        if error.retry_after_s is not None:
            told["retry_after_ms"] = round(1000 * error.retry_after_s)
        for name, value in told.items():
            response.parameters[name].CopyFrom(parameter(value))
        words = f"{words_of(error)} (request {error.request_id})"
        await self._write(ModelStreamInferResponse(error_message=words, infer_response=response))

    async def _write(self, message: ModelStreamInferResponse) -> None:
        async with self._turn:
            writing = asyncio.ensure_future(self._context.write(message))
            writing.add_done_callback(_read)
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # or it would be in the way of the next one, and of the stream's status
                raise
            except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
                raise ClientGone from error


def _read(done: asyncio.Future[Any]) -> None:
    """Look at how it ended, as a write does for nobody whose stream was cancelled meanwhile."""
    if not done.cancelled():
        done.exception()
