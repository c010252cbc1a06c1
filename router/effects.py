"""What a `RequestTracker` wants done, in order. Every effect names its attempt, so that it stays right if it is done
late."""

from __future__ import annotations

from dataclasses import dataclass

from pdcore.errors import RequestError
from pdcore.types import FinishReason, RequestKey, RequestSpec


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Ask decode worker `worker_id` for room."""

    worker_id: str
    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Let prefill worker `worker_id` compute the prompt, with the ticket that was just granted."""

    worker_id: str
    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class SendGenerate:
    """Let `worker_id` run the whole request."""

    worker_id: str
    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class SendCredit:
    """Return `tokens` of the request's window to `worker_id`."""

    worker_id: str
    key: RequestKey
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """`worker_id` has computed the prompt: it no longer counts as queued there."""

    worker_id: str
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Release:
    """The attempt is over for `worker_id`, or was only planned there. With `abort` it must be told.

    `served`: it has done what was asked of it. `peer`: the decode worker that has its KV, of a prefill worker.
    """

    worker_id: str
    key: RequestKey
    abort: bool
    reason: str
    served: bool = False
    peer: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """An attempt was lost through `worker_id`, or by a transfer from the first to the second of `pair`.

    Comes before what follows of it, and also if that is the end.
    """

    worker_id: str
    key: RequestKey
    reason: str
    pair: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Requeue:
    """Run the request again.

    `counted`: as a replay. `worker_id`: who failed or refused. `pair`: the prefill and the decode worker between
    which a transfer failed; empty if that is not what happened.
    """

    counted: bool
    worker_id: str
    reason: str
    pair: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the request ended: with a finish reason, or with an error."""

    finish: FinishReason
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event."""

    outcome: Outcome


Effect = (
    SendReserve | SendPrefill | SendGenerate | SendCredit | PrefillComputed | Release | WorkerFailed | Requeue | Ended
)
