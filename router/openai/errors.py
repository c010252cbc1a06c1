"""What an HTTP client is told of an error: status, headers and OpenAI's error body. The design's table, for HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdcore.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestCancelled,
    RequestError,
    Unauthenticated,
    Unavailable,
    UnknownMethod,
    UnknownModel,
)

Headers = list[tuple[bytes, bytes]]

BODY = "body"
"""Field of an InvalidRequest that is about the message as a whole; clients are told no parameter then."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a prompt that does not fit into the context, which programs look for to shorten it."""


class HttpProblem(RequestError):
    """An error of HTTP's own, as an unknown path or a body that is too large."""

    def __init__(self, status: int, code: str, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reason = code.upper()
        self.headers = tuple(headers)


class Kind(NamedTuple):
    """`type` and `code` are those of OpenAI where it has them; an empty code: the error's reason."""

    status: int
    type: str
    code: str | None = ""


_BAD = "invalid_request_error"

# The first class that fits counts, so subclasses stand before their bases.
KINDS: tuple[tuple[type[RequestError], Kind], ...] = (
    (InvalidRequest, Kind(400, _BAD, None)),
    (UnknownModel, Kind(404, _BAD, "model_not_found")),
    (Unauthenticated, Kind(401, _BAD, "invalid_api_key")),
    (AlreadyRunning, Kind(409, _BAD)),
    (RateLimited, Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (Overloaded, Kind(429, "overloaded_error")),
    (Unavailable, Kind(503, "server_error")),
    (DeadlineExceeded, Kind(504, "timeout_error")),
    (RequestCancelled, Kind(499, _BAD)),
    (UnknownMethod, Kind(404, _BAD)),
    (InternalError, Kind(500, "server_error", "internal_error")),
)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """`body`: OpenAI's, as JSON. `headers`: those that the error brings."""

    status: int
    body: bytes
    headers: Headers = field(default_factory=list)


def reply_of(error: RequestError) -> ErrorReply:
    """The reply that tells a client of `error`."""
    if isinstance(error, HttpProblem):
        kind = Kind(error.status, _BAD)
    else:
        kind = next((kind for cls, kind in KINDS if isinstance(error, cls)), Kind(500, "server_error"))
    body = {
        "message": str(error),
        "type": kind.type,
        "param": _param(error),
        "code": _code(error, kind),
    }
    return ErrorReply(kind.status, json.dumps({"error": body}).encode(), _headers(error))


def _param(error: RequestError) -> str | None:
    if isinstance(error, InvalidRequest):
        return error.field if error.field != BODY else None
    return "model" if isinstance(error, UnknownModel) else None


def _code(error: RequestError, kind: Kind) -> str | None:
    if isinstance(error, InvalidRequest) and "context_tokens" in error.facts:
        return TOO_LONG
    return error.reason.lower() if kind.code == "" else kind.code


def _headers(error: RequestError) -> Headers:
    headers: Headers = []
    if isinstance(error, HttpProblem):
        headers += [(name.encode(), value.encode()) for name, value in error.headers]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        delay_s = max(0.0, error.retry_after_s)
        # Whole seconds are all that `retry-after` can say; clients of OpenAI's making prefer the other one.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(delay_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, round(1000 * delay_s))))
    return headers


def renamed(error: InvalidRequest, names: Sequence[tuple[str, str]]) -> InvalidRequest:
    """The error with its fields' names as HTTP clients know them.

    Args:
        names: beginnings of the core's names, and what stands for them; the first that fits counts. One that ends
            with a dot is a group of fields; of one that ends with a star the rest is not told.
    """
    first, *others = [(_renamed(name, names), problem) for name, problem in error.violations]
    told = InvalidRequest(*first, more=others).with_facts(**error.facts)
    told.request_id = error.request_id
    return told


def _renamed(field_name: str, names: Sequence[tuple[str, str]]) -> str:
    for ours, theirs in names:
        if ours.endswith("*") and field_name.startswith(ours[:-1]):
            return theirs
        rest = field_name[len(ours) :]
        if field_name.startswith(ours) and (ours.endswith(".") or not rest or rest[0] in ".["):
            return (theirs + rest) or BODY
    return field_name
