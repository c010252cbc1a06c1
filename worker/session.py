"""The worker's end of the sessions: handshake, commands in, reports out, and who owns which request.

One session per router::

    Hello -> OPEN --(stream ends | router silent | superseded | worker stops)--> CLOSED
               |                                                                    |
               '- commands, reports, heartbeats both ways        all its requests are aborted

Request ids are scoped inside a worker by the router's incarnation ("incarnation/id"), so that two routers may use the
same id, and a router that was started anew cannot meet what its predecessor left behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import grpc

from engine.step_log import StepRecord
from pdcore.clock import Clock
from pdcore.errors import HandshakeRefused, InvalidRequest, PdserveError, Unavailable
from pdcore.tracebacks import wordless
from pdcore.types import PROTOCOL_VERSION, RequestKey, RequestSpec, WorkerLoad
from protos import worker_pb2, worker_pb2_grpc
from protos.convert import spec_from_proto, ticket_from_proto, ticket_to_proto
from worker.cache_news import CacheFollower, CacheSource
from worker.events import steps_reply
from worker.handler import RoleHandler, failed_notice, failure_of
from worker.outbox import Outbox

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RouterSession:
    """One router's session on this worker. `last_heard` is on the worker's clock."""

    router_id: str
    router_incarnation: str
    outbox: Outbox
    last_heard: float
    cancel: Callable[[], object]
    cache: CacheFollower
    keys: set[RequestKey] = field(default_factory=set)

    def scoped(self, request_id: str, attempt: int) -> RequestKey:
        return RequestKey(f"{self.router_incarnation}/{request_id}", attempt)


def bare_id(key: RequestKey) -> str:
    """The request id as the router knows it."""
    return key.request_id.split("/", 1)[1]


class SessionHub(worker_pb2_grpc.WorkerServicer):
    """Serves `Worker.Session` and is the `Reporter` of the worker's role.

    Args:
        welcome: answer to a Hello that fits. load: the load to report, now. cache: what routers hear of the prefix
            cache. steps: the last steps, so many at most.
        heartbeat_s: seconds between reports without news. dead_after_s: silence that ends a session.
        on_crash: called if the watch over silent routers fails.
    """

    def __init__(
        self,
        *,
        welcome: worker_pb2.Welcome,
        load: Callable[[], WorkerLoad],
        cache: CacheSource,
        steps: Callable[[int], Sequence[StepRecord]],
        clock: Clock,
        heartbeat_s: float,
        dead_after_s: float,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._welcome = welcome
        self._load = load
        self._cache = cache
        self._steps = steps
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._on_crash = on_crash
        self._lock = threading.RLock()
        self._sessions: dict[str, RouterSession] = {}
        self._owners: dict[RequestKey, RouterSession] = {}
        self._branches: dict[RequestKey, tuple[RequestKey, ...]] = {}  # of trunks
        self._handler: RoleHandler | None = None
        self._draining = False
        self._stopped = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="session-watchdog", daemon=True)

    def start(self, handler: RoleHandler) -> None:
        self._handler = handler
        self._watchdog.start()

    @property
    def handler(self) -> RoleHandler:
        assert self._handler is not None, "the hub has not been started"
        return self._handler

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse new requests from now on, and say so to every router at once."""
        self._draining = True
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.outbox.step([])

    def all_told(self) -> bool:
        """Every stream has taken all news for its router."""
        with self._lock:
            return all(session.outbox.empty for session in self._sessions.values())

    def close(self) -> None:
        """End every session; their requests are aborted."""
        self._stopped.set()
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            self._end(session, "the worker stops")
        if self._watchdog.ident is not None and self._watchdog is not threading.current_thread():
            self._watchdog.join(timeout=5.0)

    # -- Reporter ----------------------------------------------------------------------------------------------

    def tokens(self, events: Sequence[tuple[RequestKey, worker_pb2.TokenEvent]]) -> None:
        by_session: dict[RouterSession, list[worker_pb2.TokenEvent]] = {}
        with self._lock:
            for key, event in events:
                session = self._owners.get(key)
                if session is None:
                    continue
                event.request_id, event.attempt = bare_id(key), key.attempt
                by_session.setdefault(session, []).append(event)
        for session, tokens in by_session.items():
            session.outbox.step(tokens)

    def notice(self, key: RequestKey, notice: worker_pb2.RequestNotice) -> None:
        with self._lock:
            session = self._owners.get(key)
        if session is None:
            return
        notice.request_id, notice.attempt = bare_id(key), key.attempt
        session.outbox.notice(notice)

    def forget(self, key: RequestKey) -> None:
        with self._lock:
            for name in (key, *self._branches.pop(key, ())):
                session = self._owners.pop(name, None)
                if session is not None:
                    session.keys.discard(name)

    def branched(self, trunk: RequestKey) -> None:
        with self._lock:
            self._branches.pop(trunk, None)
        self.forget(trunk)

    # -- for people -------------------------------------------------------------------------------------------

    def GetSteps(
        self, request: worker_pb2.GetStepsRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetStepsReply:
        """See worker.proto."""
        return steps_reply(self._steps(request.count), self._clock.now())

    # -- the stream --------------------------------------------------------------------------------------------

    def Session(
        self, request_iterator: Iterator[worker_pb2.SessionCommand], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.SessionEvent]:
        """See worker.proto. This generator writes; a thread of its own reads the commands."""
        hello_bound = threading.Timer(self._dead_after_s, context.cancel)
        hello_bound.daemon = True
        hello_bound.start()
        first = next(request_iterator, None)
        hello_bound.cancel()
        if first is None or first.WhichOneof("command") != "hello":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first command of a session must be Hello")
        assert first is not None
        try:
            self._check(first.hello)
        except HandshakeRefused as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        session = self._begin(first.hello, context)
        # Fires on any end of the call, also when this generator is stuck behind a full stream.
        if not context.add_callback(lambda: self._end(session, "the stream ended")):
            self._end(session, "the stream ended")
            return
        reader = threading.Thread(
            target=self._read, args=(session, request_iterator), name=f"session-{session.router_id}", daemon=True
        )
        reader.start()
        yield worker_pb2.SessionEvent(welcome=self._welcome)
        # At once, not a heartbeat later: a router does not choose a worker whose load it does not know.
        yield from self._news(session)
        while session.outbox.wait(self._heartbeat_s):
            yield from self._news(session)

    def _news(self, session: RouterSession) -> list[worker_pb2.SessionEvent]:
        return session.outbox.take(self._load(), self._draining, session.cache.take())

    def _check(self, hello: worker_pb2.Hello) -> None:
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            raise HandshakeRefused(
                "protocol version", PROTOCOL_VERSION, f"{hello.protocol_min} to {hello.protocol_max}"
            )
        ours = self._welcome.worker_incarnation
        if hello.worker_incarnation and hello.worker_incarnation != ours:
            raise HandshakeRefused("worker incarnation", ours, hello.worker_incarnation)
        digest = self._welcome.model.digest
        if hello.model_digest and hello.model_digest != digest:
            raise HandshakeRefused("model digest", digest, hello.model_digest)
        if not hello.router_id:
            raise HandshakeRefused("router id", "a non-empty name", hello.router_id)
        if not hello.router_incarnation or "/" in hello.router_incarnation:
            raise HandshakeRefused("router incarnation", "a non-empty name without '/'", hello.router_incarnation)

    def _begin(self, hello: worker_pb2.Hello, context: grpc.ServicerContext) -> RouterSession:
        session = RouterSession(
            hello.router_id,
            hello.router_incarnation,
            Outbox(),
            self._clock.now(),
            cancel=context.cancel,
            cache=CacheFollower(self._cache),
        )
        with self._lock:
            old = self._sessions.get(session.router_id)
            self._sessions[session.router_id] = session
        if old is not None:
            # No command of the new session is read before this is done: the old one's work is released first.
            self._end(old, "superseded by a new session of the same router")
        if self._stopped.is_set():
            self._end(session, "the worker stops")
        logger.info("session of router %s (%s) begins", session.router_id, session.router_incarnation)
        return session

    def _end(self, session: RouterSession, reason: str) -> None:
        """Idempotent. Releases everything that the router owns here, then lets the stream end."""
        with self._lock:
            if session.outbox.closed:
                return
            session.outbox.close()
            if self._sessions.get(session.router_id) is session:
                del self._sessions[session.router_id]
            keys, session.keys = session.keys, set()
            for key in keys:
                self._owners.pop(key, None)
                self._branches.pop(key, None)
        logger.info("session of router %s ends: %s; %d requests released", session.router_id, reason, len(keys))
        for key in keys:
            self.handler.abort(key, f"session ended: {reason}")

    def _watch(self) -> None:
        try:
            self._end_silent_sessions()
        except Exception as error:
            logger.exception("the watch over sessions has failed", exc_info=wordless(error))
            self._on_crash(error)

    def _end_silent_sessions(self) -> None:
        while not self._stopped.wait(min(0.25, self._heartbeat_s)):
            limit = self._clock.now() - self._dead_after_s
            with self._lock:
                silent = [session for session in self._sessions.values() if session.last_heard < limit]
            for session in silent:
                self._end(session, f"the router was silent for {self._dead_after_s} s")
                session.cancel()

    def _read(self, session: RouterSession, commands: Iterator[worker_pb2.SessionCommand]) -> None:
        try:
            for command in commands:
                if session.outbox.closed:
                    return
                session.last_heard = self._clock.now()
                self._dispatch(session, command)
            self._end(session, "the router closed it")
        except grpc.RpcError:
            self._end(session, "the stream broke")
        except Exception as error:
            # A bug in a handler must not leave a session that listens to nobody.
            logger.exception("a command of router %s failed", session.router_id, exc_info=wordless(error))
            self._end(session, "internal error")
            session.cancel()

    # -- commands ----------------------------------------------------------------------------------------------

    def _dispatch(self, session: RouterSession, command: worker_pb2.SessionCommand) -> None:
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(session, command.reserve)
            case "prefill":
                ticket = ticket_from_proto(command.prefill.ticket)
                self._take(
                    session,
                    command.prefill.request,
                    lambda spec: self.handler.prefill(session.router_id, spec, ticket),
                )
            case "generate":
                self._take(
                    session,
                    command.generate.request,
                    lambda spec: self.handler.generate(session.router_id, spec),
                )
            case "abort":
                key = session.scoped(command.abort.request_id, command.abort.attempt)
                self.forget(key)
                self.handler.abort(key, command.abort.reason)
            case "credits":
                for credit in command.credits.credits:
                    self.handler.credit(session.scoped(credit.request_id, credit.attempt), credit.tokens)
            case "drain":
                self.drain()
            case "heartbeat":
                self.handler.renew(session.router_id)
            case other:
                logger.warning("router %s sent an unexpected command: %s", session.router_id, other)

    def _reserve(self, session: RouterSession, command: worker_pb2.Reserve) -> None:
        request = command.request
        reply = worker_pb2.ReserveReply(request_id=request.request_id, attempt=request.attempt)
        key = session.scoped(request.request_id, request.attempt)
        try:
            spec = self._admit(session, request)
            ticket = self.handler.reserve(session.router_id, spec)
        except PdserveError as error:
            if not isinstance(error, _AlreadyHere):
                self.forget(key)
            reply.refused.CopyFrom(failure_of(error))
        else:
            reply.granted.CopyFrom(ticket_to_proto(ticket))
        session.outbox.reply(reply)
        self._abort_if_ended(session, key)

    def _take(
        self,
        session: RouterSession,
        request: worker_pb2.WorkerRequest,
        start: Callable[[RequestSpec], None],
    ) -> None:
        key = session.scoped(request.request_id, request.attempt)
        try:
            start(self._admit(session, request))
        except _AlreadyHere as error:
            logger.warning("router %s: %s", session.router_id, error)
        except PdserveError as error:
            self.forget(key)
            notice = failed_notice(error)
            notice.request_id, notice.attempt = request.request_id, request.attempt
            session.outbox.notice(notice)
        self._abort_if_ended(session, key)

    def _admit(self, session: RouterSession, request: worker_pb2.WorkerRequest) -> RequestSpec:
        """Make `session` the owner of the request. Raises InvalidRequest, or Unavailable while draining."""
        if self._draining:
            raise Unavailable("the worker is draining")
        key = session.scoped(request.request_id, request.attempt)
        request.request_id = key.request_id
        try:
            spec = spec_from_proto(request)
        finally:
            request.request_id = bare_id(key)
        branches = tuple(branch._replace(key=session.scoped(*branch.key)) for branch in spec.branches)
        spec = replace(spec, branches=branches)
        with self._lock:
            if session.outbox.closed:
                raise Unavailable("the session has ended")
            if key in self._owners:
                raise _AlreadyHere(key)
            if not self._owners.keys().isdisjoint(spec.branch_keys):
                raise InvalidRequest("branches", "must not be here already")
            for name in (key, *spec.branch_keys):
                self._owners[name] = session
                session.keys.add(name)
            if spec.branches:
                self._branches[key] = spec.branch_keys
        return spec

    def _abort_if_ended(self, session: RouterSession, key: RequestKey) -> None:
        """The session may have ended while its command was taken: its request was aborted too early then."""
        if session.outbox.closed:
            self.handler.abort(key, "the session ended")


class _AlreadyHere(InvalidRequest):
    """The same attempt was sent twice; the first one goes on."""

    def __init__(self, key: RequestKey) -> None:
        super().__init__("request_id", f"attempt {key.attempt} of {bare_id(key)!r} is here already")
