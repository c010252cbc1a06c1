"""What stands before every gRPC method of a router: keys, messages that are none, and errors as statuses."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdcore.errors import InternalError, InvalidRequest, Overloaded, RequestError, UnknownMethod
from pdcore.tracebacks import wordless
from router.api_keys import Door
from router.arrivals import Arrivals
from router.calls import ClientGone
from router.validation import new_request_id, usable_id
from router.wire_errors import abort

logger = logging.getLogger(__name__)

MALFORMED = "MALFORMED_MESSAGE"


class _Malformed:
    """Stands for a message that does not parse."""


_MALFORMED = _Malformed()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Around every method of a server.

    Lets nobody in without a key, where there are keys. A RequestError that a method raises becomes its status
    (`router.wire_errors`), and anything else INTERNAL without details; a message that does not parse, and a method
    that is not there, are the client's mistake. Each such status has the request's id, or one that is made for it.
    (By itself grpc.aio answers a failing deserializer or method with UNKNOWN and the exception's text, and logs a
    traceback for each, which anybody may cause.)

    Calls that need no key may be `max_public` at one time of each method: whoever has one finds room beside them.

    Args:
        open_to_all: services (``package.Service``) and methods (``package.Service/Method``) that need no key.
        for_admins: services that need an operator's.

    Attributes:
        arrivals: of the calls of all other methods.
    """

    def __init__(
        self, door: Door, open_to_all: Collection[str], for_admins: Collection[str], max_public: int
    ) -> None:
        self.arrivals = Arrivals()
        self._door = door
        self._open_to_all = frozenset(open_to_all)
        self._for_admins = frozenset(for_admins)
        self._max_public = max_public
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}  # by method; there are as many as the server has

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return _refusing(UnknownMethod(f"there is no method {details.method[:256]!r} here"))
        method, metadata = details.method.lstrip("/"), details.invocation_metadata or ()
        service = method.partition("/")[0]
        public = method in self._open_to_all or service in self._open_to_all
        try:
            if service in self._for_admins:
                self._door.admit_admin(metadata)
            elif not public:
                self.arrivals.note()
                self._door.caller(metadata)
        except RequestError as error:
            return _refusing(error)
        guarded = self._guarded.get(method)
        if guarded is None:
            guarded = _public(handler, self._max_public) if public else _guarded(handler)
            self._guarded[method] = guarded
        return guarded


def _refusing(error: RequestError) -> grpc.RpcMethodHandler:
    """Answers whatever comes with `error`, and reads nothing of it."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await _fail(context, error, None)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guarded(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    parse, serialize = handler.request_deserializer, handler.response_serializer
    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(_with_status(handler.stream_stream), parse, serialize)
        return grpc.stream_unary_rpc_method_handler(_with_status(handler.stream_unary), parse, serialize)
    if parse is not None:
        parse = _careful(parse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_with_status(handler.unary_stream), parse, serialize)
    return grpc.unary_unary_rpc_method_handler(_with_status(handler.unary_unary), parse, serialize)


def _public(handler: grpc.RpcMethodHandler, limit: int) -> grpc.RpcMethodHandler:
    """The same for `limit` calls at one time. A method of one message is served as one of a stream, so that a call
    counts before its message has come, which may be never."""
    method = next(
        each
        for each in (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        if each is not None
    )
    running = 0

    async def call(messages: Any, context: grpc.aio.ServicerContext) -> None:
        nonlocal running
        if running >= limit:
            raise Overloaded(f"{running} calls of this method run, as many as may without an API key", 1.0)
        running += 1
        try:
            if not handler.request_streaming:
                messages = await context.read()
                if messages is grpc.aio.EOF:
                    raise DecodeError
                _check_parsed(messages)
            answer = method(messages, context)
            if inspect.isasyncgen(answer):
                async for message in answer:
                    await context.write(message)
            elif handler.response_streaming:  # it writes by itself
                await answer
            else:
                await context.write(await answer)
        finally:
            running -= 1

    parse = handler.request_deserializer
    if parse is not None and not handler.request_streaming:
        parse = _careful(parse)
    return grpc.stream_stream_rpc_method_handler(_with_status(call), parse, handler.response_serializer)


def _careful(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _MALFORMED

    return parse


def _with_status(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(method):

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                _check_parsed(request)
                async for message in method(request, context):
                    yield message
            except Exception as error:  # noqa: BLE001  # all of them become statuses
                await _fail(context, error, request)

        return stream

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            _check_parsed(request)
            return await method(request, context)
        except Exception as error:  # noqa: BLE001  # all of them become statuses
            await _fail(context, error, request)

    return call


def _check_parsed(request: Any) -> None:
    if request is _MALFORMED:
        raise DecodeError


async def _fail(context: grpc.aio.ServicerContext, error: Exception, request: Any) -> None:
    """End the call by what an error means."""
    failure: RequestError
    match error:
        case grpc.aio.AbortError():
            raise error
        case ClientGone() | grpc.aio.InternalError() | grpc.aio.UsageError():
            # There is nobody to write to any more. grpc.aio may not know it yet: it would try to end a call that
            # returns or fails, with metadata for the second time if their sending has failed, and log that as an
            # error nobody handles. It leaves a call that is cancelled alone.
            raise asyncio.CancelledError from error
        case RequestError():
            failure = error
            failure.request_id = failure.request_id or _id_of(request)
        case DecodeError():
            failure = InvalidRequest("message", "is not what the method takes: it does not parse")
            failure.reason, failure.request_id = MALFORMED, new_request_id()
        case _:
            failure = bug(error, _id_of(request))
    note(failure, failure.request_id)
    with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # the call is over, and nobody there to be told
        await abort(context, failure)


def note(failure: RequestError, request_id: str) -> None:
    """Put the end of a request into the log, where whoever was told its id will look for it: neither what was asked,
    nor the error's words about it."""
    logger.info("request %s fails: %s", request_id, failure.reason, extra={"request_id": request_id})


def bug(error: Exception, request_id: str) -> InternalError:
    """What a client is told of an error that is ours; the log has the rest under the same id."""
    about = {"request_id": request_id}
    logger.error("internal error in a call, request %s", request_id, exc_info=wordless(error), extra=about)
    failure = InternalError(f"internal error, request {request_id}")
    failure.request_id = request_id
    return failure


def _id_of(request: Any) -> str:
    asked = getattr(request, "request_id", "") or getattr(request, "id", "")
    return asked if isinstance(asked, str) and usable_id(asked) else new_request_id()
