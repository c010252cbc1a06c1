"""The router's end of a worker's session: handshake, commands out, events in, and when the worker counts as dead."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import grpc

from pdcore.clock import Clock
from pdcore.errors import HandshakeRefused, PdserveError, Unavailable
from pdcore.tracebacks import wordless
from pdcore.types import PROTOCOL_VERSION, KvGeometry, ModelInfo, RequestKey, Role, WorkerLoad
from protos import membership_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import geometry_from_proto, load_from_proto, model_from_proto, role_from_proto
from router.channels import internal_channel_options
from security.internal import PLAIN, Internal

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
NO_LONGER_USED = "the worker is no longer used"


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Who opens the sessions. `served_name`: the model that every worker must serve."""

    router_id: str
    incarnation: str
    served_name: str


@dataclass(frozen=True, slots=True)
class SessionTiming:
    """Seconds: between heartbeats, of silence (or of standing still) that count as death, and for which the return of
    a window's tokens waits for others to go with."""

    heartbeat_s: float
    dead_after_s: float
    credit_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker said in its Welcome."""

    worker_id: str
    incarnation: str
    role: Role
    model: ModelInfo
    geometry: KvGeometry
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_codecs: frozenset[str]


class SessionListener(Protocol):
    """Who uses the sessions. Called on the event loop; must not block. Only the live session's news arrive."""

    def expected_digest(self) -> str:
        """Model digest that a worker must have; empty while any will do."""
        ...

    def on_connected(self, client: WorkerClient) -> None: ...

    def on_reserve_reply(self, client: WorkerClient, reply: worker_pb2.ReserveReply) -> None: ...

    def on_report(self, client: WorkerClient, report: worker_pb2.Report) -> None: ...

    def on_lost(self, client: WorkerClient, reason: str) -> None:
        """The session that was connected has ended, and with it everything that the worker held for this router.
        Called once per `on_connected`."""
        ...


class _SessionDead(PdserveError):
    """The session must be given up, for the reason in the message."""


class WorkerClient:
    """Keeps a session with one incarnation of a worker for as long as it is a member.

    ::

        CONNECTING --Welcome fits--> CONNECTED --stream ends | silence | no progress--> LOST
            ^  |  |                   ^                                                   |
            |  |  '-last session made no progress-> PROBATION -progress grows-'           |
            |  '- refused, unreachable: `problem` says why                                |
            '-------------------------------- backoff ------------------------------------'

    A live worker's progress grows even while it has nothing to do, so one that stands still is dead, idle or not. Its
    session may well come up again, since something else answers for it: it stays in probation, not connected for
    anybody, until its progress has grown within the new session.

    Commands go into a mailbox that one task drains: concurrent writes would end the call. What is in the mailbox when
    the session ends is dropped, since the worker releases everything with the session.

    Attributes:
        member: as the membership listed it. facts: from the Welcome; None while not connected.
        problem: why there is no session; empty if there is one.
        load, load_at, draining: of the last report, and when it came (seconds on the clock).
    """

    def __init__(
        self,
        member: membership_pb2.WorkerDescription,
        *,
        identity: RouterIdentity,
        timing: SessionTiming,
        listener: SessionListener,
        clock: Clock,
        max_message_bytes: int,
        internal: Internal = PLAIN,
    ) -> None:
        self.member = member
        self.facts: WorkerFacts | None = None
        self.problem = "not connected yet"
        self._load: WorkerLoad | worker_pb2.Load = WorkerLoad()
        self.load_at = 0.0
        self.draining = False
        self._identity = identity
        self._timing = timing
        self._listener = listener
        self._clock = clock
        self._options = internal_channel_options(max_message_bytes)
        self._internal = internal
        self._outbox: list[worker_pb2.SessionCommand] = []
        self._mail = asyncio.Event()
        self._last_progress = 0.0
        self._stalled = False  # the last session ended, or this one is in probation, for lack of progress
        self._probation: WorkerFacts | None = None
        self._first_progress: int | None = None
        self._pending_reserves: dict[tuple[str, int], float] = {}
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None  # of the session

    @property
    def worker_id(self) -> str:
        return self.member.worker_id

    @property
    def connected(self) -> bool:
        return self.facts is not None

    @property
    def load(self) -> WorkerLoad:
        # A worker reports with each step, and is looked at when there is something to decide: far less often.
        if isinstance(self._load, worker_pb2.Load):
            self._load = load_from_proto(self._load)
        return self._load

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session-{self.worker_id}")

    async def stop(self) -> None:
        """End the session, if any, and do not come back. `on_lost` is called if it was connected."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send(self, command: worker_pb2.SessionCommand) -> None:
        """Queue a command for the live session; dropped if there is none."""
        if self.facts is None:
            return
        if command.HasField("reserve"):
            request = command.reserve.request
            self._pending_reserves[request.request_id, request.attempt] = self._clock.now()
        self._outbox.append(command)
        self._mail.set()

    def credit(self, key: RequestKey, tokens: int) -> None:
        """Queue the return of so many tokens of a request's window, in one message with others of about the time."""
        if self.facts is None:
            return
        if not self._outbox or not self._outbox[-1].HasField("credits"):
            self._outbox.append(worker_pb2.SessionCommand(credits=worker_pb2.Credits()))
            asyncio.get_running_loop().call_later(self._timing.credit_wait_s, self._mail.set)
        self._outbox[-1].credits.credits.add(request_id=key.request_id, attempt=key.attempt, tokens=tokens)

    async def last_steps(self, count: int) -> worker_pb2.GetStepsReply:
        """What the last `count` steps of the worker's engine did. Raises Unavailable if it does not say."""
        if self.facts is None or self._channel is None:
            raise Unavailable(self.problem)
        try:
            request = worker_pb2.GetStepsRequest(count=count)
            stub = worker_pb2_grpc.WorkerStub(self._channel)
            reply: worker_pb2.GetStepsReply = await stub.GetSteps(
                request, timeout=self._timing.dead_after_s, metadata=self._internal.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{error.code().name}: {error.details()}") from error
        return reply

    # -- the life of sessions ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = MIN_BACKOFF_S
        while True:
            had_session = False
            try:
                # A channel per session: one that failed may hold on to a dead connection.
                async with self._internal.aio_channel(self.member.address, self._options) as channel:
                    self._channel = channel
                    try:
                        await self._session(channel)
                    finally:
                        self._channel = None
                        had_session = self.facts is not None
            except asyncio.CancelledError:
                self._lost(NO_LONGER_USED)
                raise
            except grpc.aio.AioRpcError as error:
                self._lost(f"{error.code().name}: {error.details()}")
            except PdserveError as error:
                self._lost(str(error))
            except Exception as error:
                # A bug in handling one event must not leave the worker without a session for ever.
                logger.exception("session with %s failed", self.worker_id, exc_info=wordless(error))
                self._lost("internal error in the session")
            backoff = MIN_BACKOFF_S if had_session else min(MAX_BACKOFF_S, 2 * backoff)
            await asyncio.sleep(backoff)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """One session, until it ends by an exception."""
        call = worker_pb2_grpc.WorkerStub(channel).Session(metadata=self._internal.metadata)
        try:
            async with asyncio.timeout(self._timing.dead_after_s):
                facts = await self._handshake(call)
        except TimeoutError:
            call.cancel()
            raise _SessionDead(f"no Welcome within {self._timing.dead_after_s} s") from None
        self.load_at = self._last_progress = self._clock.now()
        if self._stalled:
            self._probation, self._first_progress = facts, None
        else:
            self._begin(facts)
        parts = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            call.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _handshake(self, call: grpc.aio.StreamStreamCall) -> WorkerFacts:
        hello = worker_pb2.Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            router_id=self._identity.router_id,
            router_incarnation=self._identity.incarnation,
            worker_incarnation=self.member.incarnation,
            model_digest=self._listener.expected_digest(),
        )
        try:
            await call.write(worker_pb2.SessionCommand(hello=hello))
        except asyncio.InvalidStateError:
            raise await _status_of(call) from None
        event = await call.read()
        if not isinstance(event, worker_pb2.SessionEvent):
            raise await _status_of(call)
        if not event.HasField("welcome"):
            raise _SessionDead("the worker's first message is not a Welcome")
        return self._check(event.welcome)

    def _check(self, welcome: worker_pb2.Welcome) -> WorkerFacts:
        """What the worker says must fit what we know of it, and the other workers."""
        facts = WorkerFacts(
            worker_id=welcome.worker_id,
            incarnation=welcome.worker_incarnation,
            role=role_from_proto(welcome.role),
            model=model_from_proto(welcome.model),
            geometry=geometry_from_proto(welcome.geometry),
            max_num_seqs=welcome.max_num_seqs,
            max_num_batched_tokens=welcome.max_num_batched_tokens,
            kv_codecs=frozenset(welcome.codecs),
        )
        digest = self._listener.expected_digest()
        pairs: list[tuple[str, object, object]] = [
            ("protocol", PROTOCOL_VERSION, welcome.protocol),
            ("worker id", self.member.worker_id, facts.worker_id),
            ("worker incarnation", self.member.incarnation, facts.incarnation),
            ("served model", self._identity.served_name, facts.model.name),
            ("model digest", digest or facts.model.digest, facts.model.digest),
        ]
        for what, ours, theirs in pairs:
            if ours != theirs:
                raise HandshakeRefused(what, ours, theirs)
        return facts

    def _begin(self, facts: WorkerFacts) -> None:
        self.facts, self.problem, self.draining = facts, "", False
        self._probation, self._stalled = None, False
        # Until the first report, which comes with the first heartbeat, the worker counts as empty.
        blocks = facts.geometry.num_blocks
        self._load = WorkerLoad(free_blocks=blocks, total_blocks=blocks)
        logger.info("session with %s (%s) is up", self.worker_id, facts.role)
        self._listener.on_connected(self)

    def _lost(self, reason: str) -> None:
        if reason != self.problem:
            level = logging.INFO if reason == NO_LONGER_USED else logging.WARNING
            logger.log(level, "no session with %s: %s", self.worker_id, reason)
        self.problem = reason
        self._probation = None
        self._outbox.clear()
        self._pending_reserves.clear()
        if self.facts is not None:
            self.facts = None
            self._listener.on_lost(self, reason)

    # -- the parts of a session ----------------------------------------------------------------------------------

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            event = await call.read()
            if not isinstance(event, worker_pb2.SessionEvent):
                raise await _status_of(call)
            self._on_event(event)

    def _on_event(self, event: worker_pb2.SessionEvent) -> None:
        now = self._clock.now()
        match event.WhichOneof("event"):
            case "report":
                report = event.report
                self.load_at = now
                if self._probation is not None and not self._has_grown(self._probation, report.load):
                    return
                if report.load.progress != self._load.progress:
                    self._last_progress = now
                self._load, self.draining = report.load, report.draining
                self._listener.on_report(self, report)
            case "reserve":
                self._pending_reserves.pop((event.reserve.request_id, event.reserve.attempt), None)
                self._listener.on_reserve_reply(self, event.reserve)
            case other:
                raise _SessionDead(f"unexpected event {other}")

    def _has_grown(self, facts: WorkerFacts, load: worker_pb2.Load) -> bool:
        """Whether probation is over; if so the session is up."""
        if self._first_progress is None:
            self._first_progress = load.progress
        if load.progress == self._first_progress:
            return False
        self._begin(facts)
        return True

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        heartbeat = worker_pb2.SessionCommand(heartbeat=worker_pb2.Heartbeat())
        beat_at = self._clock.now()
        while True:
            now = self._clock.now()
            if now >= beat_at:
                self._outbox.append(heartbeat)
                beat_at = now + self._timing.heartbeat_s
            self._mail.clear()
            commands, self._outbox = self._outbox, []
            for command in commands:
                try:
                    await call.write(command)
                except asyncio.InvalidStateError:
                    raise await _status_of(call) from None
            try:
                async with asyncio.timeout(max(0.0, beat_at - self._clock.now())):
                    await self._mail.wait()
            except TimeoutError:
                pass  # time for a heartbeat

    async def _watch(self) -> None:
        limit, interval = self._timing.dead_after_s, self._timing.heartbeat_s / 2
        while True:
            slept_at = self._clock.now()
            await asyncio.sleep(interval)
            now = self._clock.now()
            if now - slept_at > 2 * interval:
                continue  # it was this loop that stood still: what the worker said meanwhile is yet to be read
            if now - self.load_at > limit:
                raise _SessionDead(f"silent for {limit} s")
            if now - self._last_progress > limit:
                self._stalled = True
                raise _SessionDead(f"no progress for {limit} s")
            oldest = min(self._pending_reserves.values(), default=now)
            if now - oldest > limit:
                raise _SessionDead(f"a reserve has had no reply for {limit} s")


async def _status_of(call: grpc.aio.StreamStreamCall) -> PdserveError:
    """Why a call has ended."""
    return _SessionDead(f"{(await call.code()).name}: {await call.details()}")
