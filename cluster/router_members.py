"""The routers of a cluster at its controller: who serves, and which of their requests hold which idempotency keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from cluster.claims import ClaimHolder, ClaimTable, Held, Refused
from pdcore.clock import Clock, MonotonicClock
from protos import routers_pb2, routers_pb2_grpc

logger = logging.getLogger(__name__)

MAX_CLAIMS = 65536
MAX_RENEWED = 1000
SETTLE_S = 0.25
"""How long a claim of a key that another request has waits for news of that request's router: a client whose router
dies comes to another one with its key at once, maybe before the death is known here."""
_KEY_BYTES = 32
_MAX_NAME_CHARS = 256
_STATES = (routers_pb2.ROUTER_STATE_SERVING, routers_pb2.ROUTER_STATE_DRAINING)


@dataclass(eq=False)
class _Entry:
    """One live registration stream. `ended` tells its handler to close it, with the reason as its status."""

    router: routers_pb2.RouterDescription
    state: routers_pb2.RouterState.ValueType
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: grpc.StatusCode = grpc.StatusCode.ABORTED
    reason: str = ""
    report: RouterReport = field(default_factory=lambda: RouterReport(0, "", 0))


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What a router said last: the workers that it has sessions with, and why not with the others; and its requests
    that have not ended."""

    connected_workers: int
    problem: str
    running_requests: int

    @classmethod
    def of(cls, message: routers_pb2.RouterRegistration) -> RouterReport:
        return cls(message.connected_workers, message.problem, message.running_requests)


class RouterMembers(routers_pb2_grpc.RoutersServicer):
    """Serves `Routers`. A router is listed for as long as its registration stream lives and speaks.

    Everything happens on one event loop. A router that comes back with a new incarnation replaces the old one, whose
    claims end, and which is refused from then on. A stream that breaks ends no claim: its router may be alive, and
    its requests with it; `died` does, and time.

    Args:
        dead_after_s: seconds of silence after which a router is taken off the list.
        max_ttl_s: the longest time that a claim may be asked for.
        grace_s: seconds after the start in which no key is given to anybody new; `max_ttl_s` unless no router can
            have known an earlier controller.
        on_change: called after every change of the list.
    """

    def __init__(
        self,
        *,
        dead_after_s: float,
        max_ttl_s: float,
        grace_s: float,
        on_change: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self._dead_after_s = dead_after_s
        self._max_ttl_s = max_ttl_s
        self._on_change = on_change
        self._clock = clock or MonotonicClock()
        self._entries: dict[str, _Entry] = {}
        self._current: dict[str, str] = {}  # router id -> its incarnation, of all that ever registered
        self._replaced: dict[str, set[str]] = {}
        self._gone = asyncio.Event()  # a router died or was replaced; there is a new one each time
        self.claims = ClaimTable(max_claims=MAX_CLAIMS, opens_at=self._clock.now() + grace_s)

    def members(self) -> list[routers_pb2.RouterMember]:
        """The list as it is now, by router id."""
        entries = sorted(self._entries.items())
        return [routers_pb2.RouterMember(router=entry.router, state=entry.state) for _, entry in entries]

    def reports(self) -> dict[str, RouterReport]:
        """By router id, of those that are listed."""
        return {router_id: entry.report for router_id, entry in self._entries.items()}

    def listed(self, router_id: str) -> bool:
        return router_id in self._entries

    def died(self, router_id: str, incarnation: str) -> None:
        """A router's process is known to have ended: its claims end at once."""
        entry = self._entries.get(router_id)
        if entry is not None and entry.router.incarnation == incarnation:
            self._end(entry, grpc.StatusCode.ABORTED, "its process has ended")
        if self._current.get(router_id, incarnation) == incarnation:
            self._forget(router_id)

    def close(self) -> None:
        """End every stream."""
        for entry in self._entries.values():
            self._end(entry, grpc.StatusCode.UNAVAILABLE, "the controller ends")

    # -- Routers ---------------------------------------------------------------------------------------------------

    # A coroutine, not a generator: a generator whose client vanishes is closed only when it is collected.
    async def Register(  # type: ignore[override]
        self, request_iterator: object, context: grpc.aio.ServicerContext
    ) -> None:
        first = await self._next(context)
        if first is None:
            return
        problem = _malformed(first)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        router = first.router
        problem = self._superseded(router.router_id, router.incarnation)
        if problem:
            logger.warning("refused a router at %s: %s", router.address, problem)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        entry = self._enter(first)
        try:
            await context.write(routers_pb2.RouterRegistrationReply())
            while (message := await self._next(context, entry)) is not None:
                entry.report = RouterReport.of(message)
                if message.state in _STATES and message.state != entry.state:
                    entry.state = message.state
                    self._on_change()
        finally:
            # A successor may be in the list by now; it stays.
            if self._entries.get(router.router_id) is entry:
                del self._entries[router.router_id]
                self._on_change()
                logger.info("router %s left", router.router_id)
        if entry.ended.is_set():
            await context.abort(entry.status, entry.reason)

    async def Claim(
        self, request: routers_pb2.ClaimRequest, context: grpc.aio.ServicerContext
    ) -> routers_pb2.ClaimReply:
        holder = _holder(request.holder)
        await self._check(
            context, holder.router_id, holder.incarnation, request.ttl_s, [(request.key, holder.request_id)]
        )
        settled, waiting = asyncio.get_running_loop().time() + SETTLE_S, True
        while (
            isinstance(answer := self.claims.claim(request.key, holder, request.ttl_s, self._clock.now()), Held)
            and waiting
        ):
            try:
                async with asyncio.timeout_at(settled):
                    await self._gone.wait()
            except TimeoutError:
                waiting = False
            await self._check_current(context, holder.router_id, holder.incarnation)
        if isinstance(answer, Held) and answer.by.router_id not in self._entries:
            # Nobody can say whether the request lives, only that its key will be free.
            answer = Refused(
                f"the request {answer.by.request_id!r} has it on {answer.by.router_id}, which is silent; unless that"
                f" is heard again it is free in at most {self._max_ttl_s:g} s"
            )
        if isinstance(answer, Refused):
            await context.abort(grpc.StatusCode.UNAVAILABLE, answer.reason)
        if isinstance(answer, Held):
            return routers_pb2.ClaimReply(held_by=routers_pb2.ClaimHolder(**answer.by._asdict()))
        return routers_pb2.ClaimReply()

    async def Renew(
        self, request: routers_pb2.RenewClaimsRequest, context: grpc.aio.ServicerContext
    ) -> routers_pb2.RenewClaimsReply:
        router, incarnation, now = request.router_id, request.incarnation, self._clock.now()
        if len(request.claims) > MAX_RENEWED:
            problem = f"claims: must be at most {MAX_RENEWED}, got {len(request.claims)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        held = [(c.key, ClaimHolder(router, incarnation, c.request_id, c.serial)) for c in request.claims]
        await self._check(
            context, router, incarnation, request.ttl_s, [(key, holder.request_id) for key, holder in held]
        )
        lost = [key for key, holder in held if not self.claims.renew(key, holder, request.ttl_s, now)]
        return routers_pb2.RenewClaimsReply(lost=lost)

    async def Release(
        self, request: routers_pb2.ReleaseClaimRequest, context: grpc.aio.ServicerContext
    ) -> routers_pb2.ReleaseClaimReply:
        self.claims.release(request.key, _holder(request.holder))
        return routers_pb2.ReleaseClaimReply()

    async def _check(
        self,
        context: grpc.aio.ServicerContext,
        router_id: str,
        incarnation: str,
        ttl_s: float,
        claims: Sequence[tuple[bytes, str]],
    ) -> None:
        """Abort a call that is malformed, or comes from a router that has a successor."""
        problem = ""
        if not router_id or not incarnation or len(router_id) + len(incarnation) > _MAX_NAME_CHARS:
            problem = f"router_id and incarnation: must be set, and have at most {_MAX_NAME_CHARS} characters"
        elif not 0 < ttl_s <= self._max_ttl_s:
            problem = f"ttl_s: must be above 0 and at most {self._max_ttl_s:g}, got {ttl_s:g}"
        elif any(len(key) != _KEY_BYTES for key, _ in claims):
            problem = f"key: must have {_KEY_BYTES} bytes"
        elif not all(1 <= len(request_id) <= _MAX_NAME_CHARS for _, request_id in claims):
            problem = f"request_id: must be set, to at most {_MAX_NAME_CHARS} characters"
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        await self._check_current(context, router_id, incarnation)

    async def _check_current(self, context: grpc.aio.ServicerContext, router_id: str, incarnation: str) -> None:
        problem = self._superseded(router_id, incarnation)
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)

    # -- the list --------------------------------------------------------------------------------------------------

    async def _next(
        self, context: grpc.aio.ServicerContext, entry: _Entry | None = None
    ) -> routers_pb2.RouterRegistration | None:
        """The stream's next message; None if the router or we ended it. Aborts the call after too long a silence."""
        waiting: list[asyncio.Future[object]] = [asyncio.ensure_future(context.read())]
        if entry is not None:
            waiting.append(asyncio.ensure_future(entry.ended.wait()))
        try:
            done, _ = await asyncio.wait(waiting, timeout=self._dead_after_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not done:
            name = entry.router.router_id if entry is not None else context.peer()
            logger.warning("router %s has been silent for %.1f s", name, self._dead_after_s)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"silent for {self._dead_after_s} s")
        if waiting[0] not in done or waiting[0].result() is grpc.aio.EOF:
            return None
        message = waiting[0].result()
        assert isinstance(message, routers_pb2.RouterRegistration)
        return message

    def _superseded(self, router_id: str, incarnation: str) -> str:
        """Why this incarnation may do nothing more, naming both; empty if it may."""
        if incarnation not in self._replaced.get(router_id, ()):
            return ""
        return f"incarnation {incarnation!r} of {router_id} has been replaced by {self._current[router_id]!r}"

    def _enter(self, registration: routers_pb2.RouterRegistration) -> _Entry:
        router = registration.router
        known = self._current.get(router.router_id)
        old = self._entries.get(router.router_id)
        if old is not None and old.router.incarnation == router.incarnation:
            self._end(old, grpc.StatusCode.ABORTED, "the same router has registered again")
        elif old is not None:
            self._end(old, grpc.StatusCode.FAILED_PRECONDITION, f"replaced by incarnation {router.incarnation!r}")
        if known is not None and known != router.incarnation:
            self._replaced.setdefault(router.router_id, set()).add(known)
        self._current[router.router_id] = router.incarnation
        self._forget(router.router_id, but=router.incarnation)
        entry = _Entry(router, registration.state, report=RouterReport.of(registration))
        self._entries[router.router_id] = entry
        self._on_change()
        logger.info("router %s joined at %s", router.router_id, router.address)
        return entry

    def _forget(self, router_id: str, *, but: str = "") -> None:
        self.claims.forget_router(router_id, but=but)
        gone, self._gone = self._gone, asyncio.Event()
        gone.set()

    @staticmethod
    def _end(entry: _Entry, status: grpc.StatusCode, reason: str) -> None:
        entry.status, entry.reason = status, reason
        entry.ended.set()


def _malformed(registration: routers_pb2.RouterRegistration) -> str:
    router = registration.router
    for name in ("router_id", "incarnation", "address"):
        if not 1 <= len(getattr(router, name)) <= _MAX_NAME_CHARS // 2:
            return f"router.{name}: must be set in the first message, to at most {_MAX_NAME_CHARS // 2} characters"
    if registration.state not in _STATES:
        return f"state: must be SERVING or DRAINING, got {registration.state}"
    return ""


def _holder(message: routers_pb2.ClaimHolder) -> ClaimHolder:
    return ClaimHolder(message.router_id, message.incarnation, message.request_id, message.serial)
