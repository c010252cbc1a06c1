"""Who serves: the controller's list of workers, kept by their registrations and followed by the routers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from cluster.router_members import RouterMembers
from pdcore.config import check_internal_listen, convertible
from pdcore.listening import was_refused
from pdcore.security import InternalSecurity
from protos import membership_pb2, membership_pb2_grpc, routers_pb2_grpc, worker_pb2
from security.internal import Internal
from worker.grpc_options import SERVER_OPTIONS

logger = logging.getLogger(__name__)

MAX_REPLACED = 64
"""Incarnations of a worker that are known to be replaced: a process of so many restarts ago is not there any more."""
_STATES = (membership_pb2.WORKER_STATE_SERVING, membership_pb2.WORKER_STATE_DRAINING)


@dataclass(eq=False)
class _Entry:
    """One live registration stream. `ended` tells the stream's handler to close it, with the reason as its status."""

    worker: membership_pb2.WorkerDescription
    state: membership_pb2.WorkerState.ValueType
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: grpc.StatusCode = grpc.StatusCode.ABORTED
    reason: str = ""


class MembershipServer(membership_pb2_grpc.MembershipServicer):
    """Serves `Membership`, and `Routers` beside it. A worker is in the list for as long as its registration stream
    lives and speaks; so is a router (`RouterMembers`).

    Everything happens on the event loop that `start` runs on; nothing here blocks it.

    The first worker fixes the model and the shape of its KV for the life of the server; one that differs is refused,
    since its KV could not be exchanged. The first worker of each role fixes that pool's dtype. Block sizes are local
    to a worker and may differ. A worker that comes back
    with a new incarnation replaces the old one, which is refused from then on.

    Args:
        host: address to listen on and to announce.
        port: 0 picks a free one.
        dead_after_s: seconds of silence after which a worker is removed.
        refresh_s: seconds after which a watcher gets the list again though nothing changed.
        kv_conversion: what decode workers do with KV of another dtype, see `TransferConfig`.
        claim_ttl_s: the longest time that a router may claim an idempotency key for without a word.
        claim_grace_s: seconds after the start in which no key is given; None takes `claim_ttl_s`, which is right
            unless no router can have known an earlier controller.
        security: certificates of this end, and the secret that workers and routers must have.
        on_change: called after every change, with the new list.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        dead_after_s: float = 3.0,
        refresh_s: float = 2.0,
        kv_conversion: str = "exact",
        claim_ttl_s: float = 10.0,
        claim_grace_s: float | None = None,
        security: InternalSecurity | None = None,
        on_change: Callable[[membership_pb2.MemberList], None] = lambda members: None,
    ) -> None:
        self.address = ""
        self._host, self._port = host, port
        self._security = security or InternalSecurity()
        self._dead_after_s, self._refresh_s = dead_after_s, refresh_s
        self._on_change = on_change
        self._entries: dict[str, _Entry] = {}
        self._replaced: dict[str, deque[str]] = {}  # worker id -> late incarnations that have a successor
        self._kv_conversion = kv_conversion
        self._reference: membership_pb2.WorkerDescription | None = None
        self._first_of: dict[int, membership_pb2.WorkerDescription] = {}  # by role
        self._version = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._server: grpc.aio.Server | None = None
        self.routers = RouterMembers(
            dead_after_s=dead_after_s,
            max_ttl_s=claim_ttl_s,
            grace_s=claim_ttl_s if claim_grace_s is None else claim_grace_s,
            on_change=self._bump,
        )

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound or must not be, or cannot be secured as asked."""
        check_internal_listen("ray.worker_host", self._host, self._security)
        internal = Internal(self._security)
        server = grpc.aio.server(interceptors=internal.aio_interceptors(), options=SERVER_OPTIONS)
        membership_pb2_grpc.add_MembershipServicer_to_server(self, server)
        routers_pb2_grpc.add_RoutersServicer_to_server(self.routers, server)
        address = f"{self._host}:{self._port}"
        try:
            bound = internal.add_port(server, address)
        except RuntimeError as error:
            raise was_refused("ray.worker_host", self._host, self._port) from error
        await server.start()
        self._server = server
        self.address = f"{self._host}:{bound}"

    async def stop(self) -> None:
        """End every stream and the server. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        # Streams first: stopping a server waits its whole grace while one is open.
        self._closing = True
        for entry in list(self._entries.values()):
            self._end(entry, grpc.StatusCode.UNAVAILABLE, "the controller ends")
        self.routers.close()
        self._bump()
        await server.stop(grace=1.0)

    def members(self) -> membership_pb2.MemberList:
        """The list as it is now, ordered by worker id."""
        entries = sorted(self._entries.items())
        members = [membership_pb2.Member(worker=entry.worker, state=entry.state) for _, entry in entries]
        return membership_pb2.MemberList(version=self._version, members=members, routers=self.routers.members())

    # -- Membership ------------------------------------------------------------------------------------------------

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
        problem = self._misfit(first.worker)
        if problem:
            logger.warning("refused %s at %s: %s", first.worker.worker_id, first.worker.address, problem)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        entry = self._enter(first)
        try:
            await context.write(membership_pb2.RegistrationReply(version=self._version))
            while (message := await self._next(context, entry)) is not None:
                if message.state in _STATES and message.state != entry.state:
                    entry.state = message.state
                    self._bump()
        finally:
            self._leave(entry)
        if entry.ended.is_set():
            await context.abort(entry.status, entry.reason)

    async def Watch(
        self, request: membership_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[membership_pb2.MemberList]:
        while not self._closing:
            changed = self._changed
            yield self.members()
            try:
                async with asyncio.timeout(self._refresh_s):
                    await changed.wait()
            except TimeoutError:
                pass  # nothing new: the list goes out again as a sign of life

    # -- the list --------------------------------------------------------------------------------------------------

    async def _next(
        self, context: grpc.aio.ServicerContext, entry: _Entry | None = None
    ) -> membership_pb2.Registration | None:
        """The stream's next message; None if the worker or we ended it. Aborts the call after too long a silence."""
        reading = asyncio.ensure_future(context.read())
        waiting: list[asyncio.Future[object]] = [reading]
        if entry is not None:
            waiting.append(asyncio.ensure_future(entry.ended.wait()))
        try:
            done, _ = await asyncio.wait(waiting, timeout=self._dead_after_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not done:
            name = entry.worker.worker_id if entry is not None else context.peer()
            logger.warning("%s has been silent for %.1f s", name, self._dead_after_s)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"silent for {self._dead_after_s} s")
        if reading not in done or reading.result() is grpc.aio.EOF:
            return None
        message: membership_pb2.Registration = reading.result()
        return message

    def _misfit(self, worker: membership_pb2.WorkerDescription) -> str:
        """Why `worker` cannot join, naming both values; empty if it can."""
        current = self._entries.get(worker.worker_id)
        if worker.incarnation in self._replaced.get(worker.worker_id, ()) and current is not None:
            return (
                f"incarnation of {worker.worker_id} differs: the cluster has {current.worker.incarnation!r}, "
                f"which replaced {worker.incarnation!r}"
            )
        if self._reference is None:
            return ""
        return _difference(self._reference, worker) or self._dtype_misfit(worker)

    def _dtype_misfit(self, worker: membership_pb2.WorkerDescription) -> str:
        alike = self._first_of.get(worker.role)
        if alike is not None and alike.geometry.dtype != worker.geometry.dtype:
            return _differing(alike, worker, "dtype")
        first = {**self._first_of, worker.role: worker}
        source, target = first.get(worker_pb2.WORKER_ROLE_PREFILL), first.get(worker_pb2.WORKER_ROLE_DECODE)
        if source is None or target is None:
            return ""
        if convertible(source.geometry.dtype, target.geometry.dtype, self._kv_conversion):
            return ""
        other = target if worker is source else source
        return _differing(other, worker, "dtype") + "; transfer.kv_conversion rounding would allow that"

    def _enter(self, registration: membership_pb2.Registration) -> _Entry:
        worker = registration.worker
        old = self._entries.get(worker.worker_id)
        if old is not None and old.worker.incarnation == worker.incarnation:
            self._end(old, grpc.StatusCode.ABORTED, "the same worker has registered again")
        elif old is not None:
            late = self._replaced.setdefault(worker.worker_id, deque(maxlen=MAX_REPLACED))
            late.append(old.worker.incarnation)
            self._end(old, grpc.StatusCode.FAILED_PRECONDITION, f"replaced by incarnation {worker.incarnation!r}")
        if self._reference is None:
            self._reference = worker
        self._first_of.setdefault(worker.role, worker)
        entry = _Entry(worker, registration.state)
        self._entries[worker.worker_id] = entry
        self._bump()
        logger.info("%s joined at %s", worker.worker_id, worker.address)
        return entry

    def _leave(self, entry: _Entry) -> None:
        # A successor may be in the list by now; it stays.
        if self._entries.get(entry.worker.worker_id) is entry:
            del self._entries[entry.worker.worker_id]
            self._bump()
            logger.info("%s left", entry.worker.worker_id)

    @staticmethod
    def _end(entry: _Entry, status: grpc.StatusCode, reason: str) -> None:
        entry.status, entry.reason = status, reason
        entry.ended.set()

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()  # wakes those who wait on it; they find the next one in its place
        self._changed = asyncio.Event()
        self._on_change(self.members())


def _malformed(registration: membership_pb2.Registration) -> str:
    worker = registration.worker
    for name in ("worker_id", "incarnation", "address", "role"):
        if not getattr(worker, name):
            return f"worker.{name}: must be set in the first message"
    if not worker.HasField("geometry") or not worker.HasField("model"):
        return "worker.geometry and worker.model: must be set in the first message"
    if registration.state not in _STATES:
        return f"state: must be SERVING or DRAINING, got {registration.state}"
    return ""


def _difference(reference: membership_pb2.WorkerDescription, worker: membership_pb2.WorkerDescription) -> str:
    """The first difference that keeps two workers from exchanging KV; empty if there is none.

    The digest covers the others and says least to a person, so it is compared last.
    """
    for name in ("num_layers", "num_kv_heads", "head_dim", "model_digest"):
        if getattr(reference.geometry, name) != getattr(worker.geometry, name):
            return _differing(reference, worker, name)
    return ""


def _differing(
    reference: membership_pb2.WorkerDescription, worker: membership_pb2.WorkerDescription, name: str
) -> str:
    ours, theirs = getattr(reference.geometry, name), getattr(worker.geometry, name)
    return (
        f"{name} differs: the cluster has {ours!r} (model {reference.model.name!r}, from {reference.worker_id}), "
        f"{worker.worker_id} has {theirs!r} (model {worker.model.name!r})"
    )
