"""`RequestError` to gRPC status and back: what the design's table says, with google.rpc details."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdcore.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    RequestError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)

# The first class that fits counts, so subclasses stand before their bases.
_CODES: tuple[tuple[type[RequestError], int], ...] = (
    (InvalidRequest, code_pb2.INVALID_ARGUMENT),
    (UnknownModel, code_pb2.NOT_FOUND),
    (Unauthenticated, code_pb2.UNAUTHENTICATED),
    (AlreadyRunning, code_pb2.ALREADY_EXISTS),
    (Overloaded, code_pb2.RESOURCE_EXHAUSTED),
    (Unavailable, code_pb2.UNAVAILABLE),
    (DeadlineExceeded, code_pb2.DEADLINE_EXCEEDED),
    (RequestCancelled, code_pb2.CANCELLED),
)


def status_of(error: RequestError) -> status_pb2.Status:
    """The status that tells a client of `error`."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), code_pb2.INTERNAL)
    status = status_pb2.Status(code=code, message=str(error))
    detail = _detail_of(error)
    if detail is not None:
        status.details.add().Pack(detail)
    return status


def _detail_of(error: RequestError) -> Message | None:
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
        detail: Message = error_details_pb2.BadRequest(field_violations=[violation])
        return detail
    if isinstance(error, UnknownModel):
        # `owner` has the names that are served.
        detail = error_details_pb2.ResourceInfo(
            resource_type="model", resource_name=error.model, owner=", ".join(error.served), description=str(error)
        )
        return detail
    if isinstance(error, AlreadyRunning):
        detail = error_details_pb2.ResourceInfo(
            resource_type="request", resource_name=error.running_id, description=str(error)
        )
        return detail
    if isinstance(error, Overloaded):
        delay = Duration()
        delay.FromMilliseconds(round(1000 * error.retry_after_s))
        detail = error_details_pb2.RetryInfo(retry_delay=delay)
        return detail
    return None


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:
    """End a call with the status of `error`."""
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort raises")


def error_of(error: grpc.RpcError) -> RequestError:
    """What a failed call means, as the router meant it. For clients."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    details = _details_of(error)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            for violation in details.bad_request.field_violations:
                return InvalidRequest(violation.field, violation.description)
            return InvalidRequest("request", message)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModel(details.resource.resource_name, details.resource.owner.split(", "))
        case grpc.StatusCode.ALREADY_EXISTS:
            return AlreadyRunning(message, details.resource.resource_name)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if details.retry_after_s is not None:
            return Overloaded(message, details.retry_after_s)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return InvalidRequest("request", message)  # larger than a message may be
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(message)
        case _:
            return InternalError(message)


class _Details:
    """The google.rpc details of a failed call that are of interest here."""

    def __init__(self) -> None:
        self.bad_request = error_details_pb2.BadRequest()
        self.resource = error_details_pb2.ResourceInfo()
        self.retry_after_s: float | None = None


def _details_of(error: grpc.RpcError) -> _Details:
    found = _Details()
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(retry):
                found.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
            detail.Unpack(found.bad_request)
            detail.Unpack(found.resource)
    return found
