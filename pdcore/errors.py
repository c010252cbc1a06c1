"""Every error that pdserve raises on purpose, in one tree.

::

    PdserveError
    |- RequestError                 the client's request cannot be served; carries what the client is told
    |  |- InvalidRequest            a bad prompt or parameter: names the field, the value and the limit
    |  |- UnknownModel              the request names a model that this cluster does not serve
    |  |- Unauthenticated           the token is missing or wrong
    |  |- AlreadyRunning            another request with the same idempotency key runs: names it
    |  |- Overloaded                the queue is full, or the deadline cannot be met; carries a retry hint
    |  |  `- RateLimited            the tenant has used up what it may ask for
    |  |- Unavailable               it cannot be served at present
    |  |  |- NoWorker               no worker is connected
    |  |  |- Draining               this router is going away; others may serve
    |  |  `- ReplaysExhausted       workers died under the request more often than it may be replayed
    |  |- DeadlineExceeded          the client's deadline passed
    |  |- RequestCancelled          the client cancelled or went away
    |  |- UnknownMethod             the router has no such call
    |  `- InternalError             a bug of ours; the client sees only the request id
    |- ConfigError                  a configuration key or value is wrong: names key, value and what is allowed
    |  |- UnknownKey                there is no such key: names the nearest that there is
    |  `- CannotListen              an address is taken, or not to be had: says what to do
    |- ModelError                   a model cannot be found, read or run: names it and says why
    |  `- UnsupportedModel          it is well formed, but needs something that is not implemented
    |- HandshakeRefused             two processes do not fit together: names both values
    `- TransferError                a KV transfer failed; `retryable` says whether trying again can help
       |- TicketError               unknown, stale, expired or exhausted ticket
       |  `- TicketRevoked          taken back by its owner: not counted as a failure
       |- FrameError                a frame that is malformed, does not fit its ticket, or fails its checksum
       `- TransferTimeout           no progress within the bound
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self


class PdserveError(Exception):
    """Base of every deliberate error. All of them can be pickled, as between a Ray actor and its owner."""

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is made anew from its message, which is not what `__init__` of most of these takes.
        return _remade, (type(self), str(self), self.__dict__)


def _remade(kind: type[PdserveError], message: str, attributes: dict[str, object]) -> PdserveError:
    error = kind.__new__(kind, message)
    error.__dict__.update(attributes)
    return error


class RequestError(PdserveError):
    """The request ends with this error. `str(error)` is safe to show to the client.

    Attributes:
        reason: what went wrong, in one word for programs.
        request_id: of the request or call that failed; empty while nobody has said.
        retry_after_s: when it may be worth trying again, in seconds; None if the same request will fail again, or
            nobody knows.
        facts: numbers and names that the message speaks of, for programs: limits, above all.
    """

    reason = "REQUEST_FAILED"
    request_id = ""
    retry_after_s: float | None = None
    facts: Mapping[str, str] = MappingProxyType({})

    def with_facts(self, **facts: object) -> Self:
        """Itself, with more facts."""
        self.facts = {**self.facts, **{name: str(value) for name, value in facts.items()}}
        return self


class InvalidRequest(RequestError):
    """A field of the request has a value that is not allowed, or several have.

    Args:
        field: dotted path of the field as the client knows it, e.g. ``sampling.top_p``.
        problem: what is wrong and what is allowed, e.g. ``"must be in (0, 1], got 1.5"``.
        more: the same of other fields.

    Attributes:
        violations: (field, problem) of every field that is known to be wrong, the first one included.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str, more: Sequence[tuple[str, str]] = ()) -> None:
        self.violations = ((field, problem), *more)
        super().__init__("; ".join(f"{name}: {words}" for name, words in self.violations))
        self.field = field
        self.problem = problem


class UnknownModel(RequestError):
    """The model that was asked for is not served here."""

    reason = "UNKNOWN_MODEL"

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(f"model {model!r} is not served here; served: {', '.join(served)}")
        self.model = model
        self.served = tuple(served)


class Unauthenticated(RequestError):
    """No token, or not the right one."""

    reason = "UNAUTHENTICATED"


class AlreadyRunning(RequestError):
    """A request with the same idempotency key has not ended yet. `running_id`: its name, which can be cancelled."""

    reason = "IDEMPOTENCY_KEY_IN_USE"

    def __init__(self, message: str, running_id: str) -> None:
        super().__init__(message)
        self.running_id = running_id


class Overloaded(RequestError):
    """The request was shed. `retry_after_s` is a hint in seconds."""

    reason = "OVERLOADED"
    retry_after_s: float

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The tenant asks for more than its limits allow; others may get in at the same time."""

    reason = "RATE_LIMITED"


class Unavailable(RequestError):
    """The request cannot be served at present. `retry_after_s` is a hint; None: not before the cluster changes."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(Unavailable):
    """No worker is connected that could take it."""

    reason = "NO_WORKER"


class Draining(Unavailable):
    """This router takes nothing new, for it is going away; others may, at once."""

    reason = "DRAINING"


class ReplaysExhausted(Unavailable):
    """Workers died or failed under this request more often than it may be replayed."""

    reason = "REPLAYS_EXHAUSTED"


class DeadlineExceeded(RequestError):
    """The client's deadline passed before the request finished."""

    reason = "DEADLINE_EXCEEDED"


class RequestCancelled(RequestError):
    """The client cancelled, disconnected, or was closed."""

    reason = "CANCELLED"


class UnknownMethod(RequestError):
    """The router has no such call."""

    reason = "UNKNOWN_METHOD"


class InternalError(RequestError):
    """A bug of ours. The details are in the log under the request id, never in the message."""

    reason = "INTERNAL"


class ConfigError(PdserveError):
    """A configuration key or value is not acceptable."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(self._words(key, value, allowed))
        self.key = key
        self.value = value
        self.allowed = allowed

    @staticmethod
    def _words(key: str, value: object, allowed: str) -> str:
        return f"{key}: {value!r} is not allowed; allowed: {allowed}"

    def found_in(self, file: str) -> Self:
        """The same error, which names the file that says so."""
        self.args = (f"{file}: {self}",)
        return self


class UnknownKey(ConfigError):
    """There is no such key. `allowed`: what there is instead."""

    @staticmethod
    def _words(key: str, value: object, allowed: str) -> str:
        return f"there is no key {key}{allowed}"


class CannotListen(ConfigError):
    """An address (`value`) cannot be listened on. `allowed`: why, and what to do."""

    @staticmethod
    def _words(key: str, value: object, allowed: str) -> str:
        return f"{key}: cannot listen on {value}: {allowed}"


class ModelError(PdserveError):
    """A model cannot be found, read or run."""


class UnsupportedModel(ModelError):
    """A model is well formed, but needs something that is not implemented: the message names it."""


class HandshakeRefused(PdserveError):
    """Two processes do not fit together; the message names both values."""

    def __init__(self, what: str, ours: object, theirs: object) -> None:
        super().__init__(f"{what} differs: ours is {ours!r}, theirs is {theirs!r}")
        self.what = what
        self.ours = ours
        self.theirs = theirs


class TransferError(PdserveError):
    """A KV transfer failed."""

    retryable = True


class TicketError(TransferError):
    """A ticket that is unknown, stale (wrong generation), expired, revoked, or used out of range."""

    retryable = False


class TicketRevoked(TicketError):
    """The decode worker took the ticket back, for it needs the memory or the request is over: nobody's fault."""


class FrameError(TransferError):
    """A frame is malformed, does not fit its ticket, or fails a checksum."""


class TransferTimeout(TransferError):
    """A transfer made no progress within its bound."""
