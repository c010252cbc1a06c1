"""What a role does with the commands of a session, and the news it sends back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.engine import StepPlan, StepResult
from pdcore.errors import InvalidRequest, PdserveError, TicketRevoked, TransferError, Unavailable
from pdcore.types import KvTicket, KvTransferStats, RequestKey, RequestSpec
from protos import worker_pb2
from protos.convert import stats_to_proto


class NotMyRole(PdserveError):
    """The command belongs to another role."""


class NoRoom(PdserveError):
    """This worker cannot take the request at present; another one may."""


class RoleHandler(Protocol):
    """A role's part of a worker. Commands come from session threads, plans and results from the engine's.

    `reserve`, `prefill` and `generate` either take the request, and then answer for it until they have reported its
    last token or a failure, or raise a PdserveError and hold nothing of it.
    """

    def reserve(self, router_id: str, spec: RequestSpec) -> KvTicket: ...

    def prefill(self, router_id: str, spec: RequestSpec, ticket: KvTicket) -> None: ...

    def generate(self, router_id: str, spec: RequestSpec) -> None: ...

    def abort(self, key: RequestKey, reason: str) -> None:
        """End a request in whichever state it is. Idempotent; nothing is reported."""
        ...

    def credit(self, key: RequestKey, tokens: int) -> None:
        """The client took `tokens` tokens. Ignored if the request is unknown."""
        ...

    def renew(self, router_id: str) -> None:
        """The router is alive: renew the leases of its tickets."""
        ...

    def revoke(self, ticket_owner: str) -> None:
        """The engine needs the blocks of this uncommitted ticket for a running sequence."""
        ...

    def on_plan(self, plan: StepPlan) -> None: ...

    def on_result(self, plan: StepPlan, result: StepResult) -> None: ...

    def held(self) -> Sequence[RequestKey]:
        """Requests of which this worker holds something: blocks, a ticket, a send."""
        ...

    def transfers(self) -> TransferLoad:
        """The transfers under way, and what went wrong with those so far."""
        ...

    def end_streams(self) -> None:
        """End the streams that other workers hold open here; the server is about to stop."""
        ...

    def close(self) -> None:
        """End all transfers; the engine loop has stopped."""
        ...


class TransferLoad(NamedTuple):
    """A role's part of `WorkerLoad`; `events` as `WorkerLoad.transfers`."""

    open_tickets: int
    open_sends: int
    events: dict[str, int]


class Reporter(Protocol):
    """Where a role sends its news. Requests that no router owns any more are passed over."""

    def tokens(self, events: Sequence[tuple[RequestKey, worker_pb2.TokenEvent]]) -> None: ...

    def notice(self, key: RequestKey, notice: worker_pb2.RequestNotice) -> None: ...

    def forget(self, key: RequestKey) -> None:
        """The request is over here, with its branches if it is a trunk; its id may be used again."""
        ...

    def branched(self, trunk: RequestKey) -> None:
        """A trunk is over here, and its branches go on without it."""
        ...


def failure_of(error: PdserveError) -> worker_pb2.RequestFailed:
    """How an error is told to a router."""
    if isinstance(error, InvalidRequest | NotMyRole):
        code = worker_pb2.FAILURE_CODE_INVALID
    elif isinstance(error, NoRoom | TicketRevoked):
        code = worker_pb2.FAILURE_CODE_OVERLOADED
    elif isinstance(error, Unavailable):
        code = worker_pb2.FAILURE_CODE_DRAINING
    elif isinstance(error, TransferError):
        code = worker_pb2.FAILURE_CODE_TRANSFER
    else:
        code = worker_pb2.FAILURE_CODE_INTERNAL
    return worker_pb2.RequestFailed(code=code, message=str(error))


def failed_notice(error: PdserveError) -> worker_pb2.RequestNotice:
    return worker_pb2.RequestNotice(failed=failure_of(error))


def stats_notice(stats: KvTransferStats) -> worker_pb2.RequestNotice:
    return worker_pb2.RequestNotice(kv_received=stats_to_proto(stats))
