"""Messages that are no protobuf: refused as the client's mistake, in one line, for every method of a server.

grpc.aio answers a failing deserializer with UNKNOWN and logs a traceback for each message, which anybody may send.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_WORDS = "the message is not what the method takes: it does not parse"


class _Malformed:
    """Stands for a message that does not parse."""


_MALFORMED = _Malformed()


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Gives every method a deserializer that cannot fail, and INVALID_ARGUMENT for what does not parse.

    For methods that take one message; streams of messages pass as they are.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse, serialize = _careful(handler.request_deserializer), handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_checked_stream(handler.unary_stream), parse, serialize)
        return grpc.unary_unary_rpc_method_handler(_checked(handler.unary_unary), parse, serialize)


def _careful(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _MALFORMED

    return parse


def _checked(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request is _MALFORMED:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _WORDS)
        return await method(request, context)

    return call


def _checked_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(method):
        return _checked(method)  # a coroutine that writes

    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        if request is _MALFORMED:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _WORDS)
        async for message in method(request, context):
            yield message

    return call
