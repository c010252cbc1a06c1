"""`RequestError` to gRPC status and back: what the design's table says, with google.rpc details.

Every status has an ErrorInfo: the error's reason, and as metadata `request_id` and the facts of the message. Beside
it stand BadRequest (which fields, all that are known), ResourceInfo (which model, which request), and RetryInfo where
trying again may help.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from pdcore.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RateLimited,
    ReplaysExhausted,
    RequestCancelled,
    RequestError,
    Unauthenticated,
    Unavailable,
    UnknownMethod,
    UnknownModel,
)
from router.connection_words import connection_words, deadline_words

DOMAIN = "pdserve"
REQUEST_ID_METADATA = "x-request-id"
"""Metadata of a call: the request's id, which the router makes if the client sent none."""

# The first class that fits counts, so subclasses stand before their bases.
CODES: tuple[tuple[type[RequestError], int], ...] = (
    (InvalidRequest, code_pb2.INVALID_ARGUMENT),
    (UnknownModel, code_pb2.NOT_FOUND),
    (Unauthenticated, code_pb2.UNAUTHENTICATED),
    (AlreadyRunning, code_pb2.ALREADY_EXISTS),
    (Overloaded, code_pb2.RESOURCE_EXHAUSTED),
    (Unavailable, code_pb2.UNAVAILABLE),
    (DeadlineExceeded, code_pb2.DEADLINE_EXCEEDED),
    (RequestCancelled, code_pb2.CANCELLED),
    (UnknownMethod, code_pb2.UNIMPLEMENTED),
    (InternalError, code_pb2.INTERNAL),
)

MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""The reason, for clients, of what gRPC itself refuses before the router sees it."""
NO_CONNECTION = "NO_CONNECTION"
"""The reason, for clients, of a connection that broke or never came about: no router has said anything."""

_DETAILS = "grpc-status-details-bin"
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_TOO_MANY_CALLS = "Concurrent RPC limit"  # what grpc.aio says of calls beyond its own bound
_UNAVAILABLE = {kind.reason: kind for kind in (NoWorker, Draining, ReplaysExhausted)}

# A status travels in a header block, of which clients take 8 KiB unless told otherwise.
_MAX_MESSAGE_BYTES = 1024
_MAX_DETAIL_BYTES = 256
_MAX_VIOLATIONS = 8


def status_of(error: RequestError) -> status_pb2.Status:
    """The status that tells a client of `error`."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), code_pb2.INTERNAL)
    status = status_pb2.Status(code=code, message=words_of(error))
    for detail in _details_of(error):
        status.details.add().Pack(detail)
    return status


def _details_of(error: RequestError) -> Iterator[Message]:
    facts = {name: _cut(value, _MAX_DETAIL_BYTES) for name, value in error.facts.items()}
    yield error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata={**facts, "request_id": error.request_id}
    )
    if isinstance(error, InvalidRequest):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=_cut(field, _MAX_DETAIL_BYTES), description=_cut(problem, _MAX_DETAIL_BYTES)
            )
            for field, problem in error.violations[:_MAX_VIOLATIONS]
        ]
        yield error_details_pb2.BadRequest(field_violations=violations)
    if isinstance(error, UnknownModel):
        # `owner` has the names that are served.
        yield error_details_pb2.ResourceInfo(
            resource_type="model", resource_name=error.model, owner=", ".join(error.served), description=str(error)
        )
    if isinstance(error, AlreadyRunning):
        yield error_details_pb2.ResourceInfo(
            resource_type="request", resource_name=error.running_id, description=str(error)
        )
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(1000 * error.retry_after_s))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def words_of(error: RequestError) -> str:
    """What a client reads of an error: short, and nothing but what a message can hold."""
    return _cut(str(error), _MAX_MESSAGE_BYTES)


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes of it, and nothing that a message cannot hold: names in JSON may be half characters."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "..."


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:
    """End a call with the status of `error`."""
    status = status_of(error)
    trailer: tuple[tuple[str, str | bytes], ...] = ((_DETAILS, status.SerializeToString()),)
    if error.request_id:
        trailer = (*trailer, (REQUEST_ID_METADATA, error.request_id))
    await context.abort(_STATUS_CODES[status.code], status.message, trailer)
    raise AssertionError("abort raises")


def error_of(error: grpc.RpcError) -> RequestError:
    """What a failed call means, as the router meant it. For clients."""
    details = _Details(error)
    failure = _failure_of(error.code(), error.details() or error.code().name, details)
    if details.info.reason:
        failure.reason = details.info.reason
        failure.facts = {name: value for name, value in details.info.metadata.items() if name != "request_id"}
        failure.retry_after_s = details.retry_after_s
    failure.request_id = details.request_id
    return failure


def _failure_of(code: grpc.StatusCode, message: str, details: _Details) -> RequestError:
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            violations = [(each.field, each.description) for each in details.bad_request.field_violations]
            if not violations:
                return InvalidRequest("request", message)
            (field, problem), *more = violations
            return InvalidRequest(field, problem, more)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModel(details.resource.resource_name, details.resource.owner.split(", "))
        case grpc.StatusCode.ALREADY_EXISTS:
            return AlreadyRunning(message, details.resource.resource_name)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if details.retry_after_s is not None:
            kind = RateLimited if details.info.reason == RateLimited.reason else Overloaded
            return kind(message, details.retry_after_s)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _TOO_MANY_CALLS in message:
            return Overloaded(message, 1.0)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            too_large = InvalidRequest("request", message)
            too_large.reason = MESSAGE_TOO_LARGE
            return too_large
        case grpc.StatusCode.UNAVAILABLE if not details.info.reason and (words := connection_words(message)):
            lost = Unavailable(words, None)
            lost.reason = NO_CONNECTION
            return lost
        case grpc.StatusCode.UNAVAILABLE:
            return _UNAVAILABLE.get(details.info.reason, Unavailable)(message, None)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(deadline_words(message))
        case grpc.StatusCode.CANCELLED if message == code.name and not details.info.reason:
            # Reset without a word, as a server that goes away does to calls that are on their way to it.
            gone = Unavailable("the router went away", None)
            gone.reason = NO_CONNECTION
            return gone
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(message)
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnknownMethod(message)
        case _:
            return InternalError(message)


class _Details:
    """The google.rpc details of a failed call that are of interest here, and the request's id."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.info = error_details_pb2.ErrorInfo()
        self.bad_request = error_details_pb2.BadRequest()
        self.resource = error_details_pb2.ResourceInfo()
        self.retry_after_s: float | None = None
        self.request_id = ""
        # Of a call that ended at the client, such as by its deadline, only the initial metadata is there.
        for key, value in (*(error.initial_metadata() or ()), *(error.trailing_metadata() or ())):
            if key == REQUEST_ID_METADATA:
                self.request_id = str(value)
            if key == _DETAILS:
                self._read(value)

    def _read(self, value: bytes) -> None:
        try:
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                retry = error_details_pb2.RetryInfo()
                if detail.Unpack(retry):
                    self.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
                for wanted in (self.info, self.bad_request, self.resource):
                    detail.Unpack(wanted)
        except DecodeError:
            return  # some other server's
