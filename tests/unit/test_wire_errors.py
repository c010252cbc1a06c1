"""Every error of the tree as a gRPC status, and back at the client."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from pdcore import errors
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
from router.violations import Violations
from router.wire_errors import CODES, abort, error_of, status_of

EXAMPLES: list[tuple[RequestError, grpc.StatusCode]] = [
    (InvalidRequest("sampling.n", "must be 1", [("tenant", "too long")]), grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModel("gpt", ["a", "b"]), grpc.StatusCode.NOT_FOUND),
    (Unauthenticated("no key"), grpc.StatusCode.UNAUTHENTICATED),
    (AlreadyRunning("it runs", "other"), grpc.StatusCode.ALREADY_EXISTS),
    (Overloaded("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RateLimited("used up", 2.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable("not now", None), grpc.StatusCode.UNAVAILABLE),
    (NoWorker("none"), grpc.StatusCode.UNAVAILABLE),
    (Draining("going"), grpc.StatusCode.UNAVAILABLE),
    (ReplaysExhausted("given up"), grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (RequestCancelled("gone"), grpc.StatusCode.CANCELLED),
    (UnknownMethod("what?"), grpc.StatusCode.UNIMPLEMENTED),
    (InternalError("a bug"), grpc.StatusCode.INTERNAL),
]


class Context:
    """A servicer's context that keeps what a call is ended with."""

    async def abort(self, code: grpc.StatusCode, details: str, trailer: tuple[tuple[str, object], ...]) -> None:
        self.code, self.details, self.trailer = code, details, trailer
        raise grpc.aio.AbortError


class Failed(grpc.RpcError):
    """A call as its client sees it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailer: object = (), initial: object = ()) -> None:
        self.code, self.details = lambda: code, lambda: details
        self.trailing_metadata, self.initial_metadata = lambda: trailer, lambda: initial


async def there_and_back(error: RequestError) -> tuple[Context, RequestError]:
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await abort(context, error)
    return context, error_of(Failed(context.code, context.details, context.trailer))


def detail(status: Status, kind: type) -> object | None:
    """The detail of that kind; None if there is none."""
    wanted = kind()
    return wanted if any(each.Unpack(wanted) for each in status.details) else None


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
async def test_an_error_comes_back_as_it_was_meant(error: RequestError, code: grpc.StatusCode) -> None:
    error.request_id = "r-1"
    error.with_facts(limit=7)
    context, back = await there_and_back(error)
    assert context.code is code
    assert dict(context.trailer)["x-request-id"] == "r-1"  # for clients that know no google.rpc
    info = detail(status_of(error), error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("pdserve", error.reason)
    assert dict(info.metadata) == {"request_id": "r-1", "limit": "7"}
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error) | {"reason": error.reason, "retry_after_s": error.retry_after_s}


def test_the_table_knows_every_error_and_reasons_are_distinct() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)}
    kinds.remove(RequestError)
    assert {type(error) for error, _ in EXAMPLES} == kinds
    assert all(any(issubclass(kind, known) for known, _ in CODES) for kind in kinds)
    reasons = [kind.reason for kind in kinds]
    assert len(set(reasons)) == len(reasons)
    assert all(reason == reason.upper() and reason.replace("_", "").isalpha() for reason in reasons)


def test_a_hint_is_given_only_where_a_retry_makes_sense() -> None:
    hinted = {type(error) for error, _ in EXAMPLES if detail(status_of(error), error_details_pb2.RetryInfo)}
    assert hinted == {Overloaded, RateLimited, NoWorker, Draining, ReplaysExhausted}


async def test_a_status_fits_into_a_header_block() -> None:
    error = InvalidRequest("é" * 40, "x" * 10**6, [("field", "ü" * 5000)] * 50)
    error.with_facts(limit="z" * 5000)
    context, back = await there_and_back(error)
    assert len(context.details.encode()) <= 1024
    assert len(dict(context.trailer)["grpc-status-details-bin"]) < 6000
    assert isinstance(back, InvalidRequest)
    assert len(back.violations) == 8


def test_what_others_say_is_understood_too() -> None:
    too_large = error_of(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"))
    assert isinstance(too_large, InvalidRequest)
    assert too_large.reason == "MESSAGE_TOO_LARGE"
    many = error_of(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"))
    assert (type(many), many.retry_after_s) == (Overloaded, 1.0)
    refused = error_of(Failed(grpc.StatusCode.UNAVAILABLE, "connection refused"))
    assert (type(refused), refused.reason) == (Unavailable, "UNAVAILABLE")
    assert refused.retry_after_s is None
    for words in ("Locally cancelled by application!", "Stream removed (Channel closed!)"):
        assert type(error_of(Failed(grpc.StatusCode.CANCELLED, words))) is RequestCancelled
    reset = error_of(Failed(grpc.StatusCode.CANCELLED, "CANCELLED"))
    assert (type(reset), reset.reason) == (Unavailable, "NO_CONNECTION")
    garbled = error_of(Failed(grpc.StatusCode.INTERNAL, "?", (("grpc-status-details-bin", b"\xff\xff"),)))
    assert type(garbled) is InternalError
    # A deadline passes at the client, which knows the id from the beginning of the stream.
    late = error_of(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "", (), (("x-request-id", "r-2"),)))
    assert (type(late), late.request_id) == (DeadlineExceeded, "r-2")


def test_a_connection_that_breaks_is_told_in_plain_words() -> None:
    for text, words in (
        ("Stream removed (Socket closed)", "the router closed the connection"),
        ("Socket closed", "the router closed the connection"),
        ("recvmsg:Connection reset by peer", "the router closed the connection"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: Failed to connect to remote "
            "host: Connection refused",
            "no connection with [::1]:1: nothing listens there",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:7: Failed to connect to "
            "remote host: No route to host",
            "no connection with 10.0.0.1:7: No route to host",
        ),
    ):
        lost = error_of(Failed(grpc.StatusCode.UNAVAILABLE, text))
        assert (type(lost), lost.reason) == (Unavailable, "NO_CONNECTION")
        assert str(lost).startswith(words)
    for text in ("Deadline Exceeded", "Stream removed (Deadline Exceeded)"):
        assert str(error_of(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, text))).startswith("the time was up")
    # What a router says stays as it is, whatever it is like.
    told = status_of(Unavailable("Socket closed"))
    said = Failed(grpc.StatusCode.UNAVAILABLE, told.message, (("grpc-status-details-bin", told.SerializeToString()),))
    assert (str(error_of(said)), error_of(said).reason) == ("Socket closed", "UNAVAILABLE")


def test_names_that_no_message_can_hold_are_told_all_the_same() -> None:
    half = "\ud800"
    status = status_of(InvalidRequest(half, "is not known", [(half, half)]).with_facts(name=half))
    told = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(told)
    assert [(each.field, each.description) for each in told.field_violations] == [("?", "is not known"), ("?", "?")]
    assert status.message == "?: is not known; ?: ?"


def test_all_violations_are_told_at_once() -> None:
    wrong = Violations()
    wrong.check()  # nothing yet
    with wrong:
        raise InvalidRequest("a", "bad").with_facts(limit=1)
    with wrong:
        pass
    wrong.add(InvalidRequest("b", "worse", [("c", "worst")]))
    with pytest.raises(InvalidRequest, match="a: bad; b: worse; c: worst") as caught:
        wrong.check()
    assert caught.value.violations == (("a", "bad"), ("b", "worse"), ("c", "worst"))
    assert caught.value.facts == {"limit": "1"}
    with pytest.raises(KeyError), wrong:
        raise KeyError
