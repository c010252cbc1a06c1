"""A worker of a dispatcher in memory: its side of the protocol, one command, one token, one event at a time.

Nothing happens by itself: whoever drives it calls `take_command`, `work` and `report` in the order that is to be
tried. What the router tells it is checked as it is told: nothing about what was never given to it or is over, and one
abort at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdcore.types import KvGeometry, RequestKey, Role, WorkerLoad
from protos import kv_pb2, membership_pb2, worker_pb2
from protos.convert import role_to_proto
from router.worker_client import SessionListener, WorkerFacts
from tests.support.null_worker import MODEL, null_token

Message = worker_pb2.WorkerRequest


def key_of(message: object) -> RequestKey:
    return RequestKey(message.request_id, message.attempt)  # type: ignore[attr-defined]


def names_of(request: Message) -> Iterator[RequestKey]:
    yield key_of(request)
    yield from map(key_of, request.branches)


@dataclass(eq=False)
class Session:
    """What the router knows as `WorkerClient`, with what it may say in it.

    `given`: to the worker, and not over as far as the router knows. `over`: released by either side. `crossing`: over
    by the report that the router is reading; what comes before that in the same report may end the request as well.
    `branches`: of trunks; they end with those, unless they are aborted before, or are there on their own.
    """

    worker: MemoryWorker
    facts: WorkerFacts | None
    member: membership_pb2.WorkerDescription
    load: WorkerLoad
    load_at: float = 0.0
    draining: bool = False
    problem: str = ""
    given: set[RequestKey] = field(default_factory=set)
    over: set[RequestKey] = field(default_factory=set)
    crossing: set[RequestKey] = field(default_factory=set)
    branches: set[RequestKey] = field(default_factory=set)

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    @property
    def connected(self) -> bool:
        return self.facts is not None

    async def stop(self) -> None:
        self.worker.lose_session("the router stops")

    def send(self, command: worker_pb2.SessionCommand) -> None:
        if self.facts is None:
            return
        name = command.WhichOneof("command")
        body = getattr(command, str(name))
        if name in ("reserve", "prefill", "generate"):
            for key in names_of(body.request):
                assert key not in self.given | self.over, f"{self.worker_id} is given {key} twice"
                (self.given if key == key_of(body.request) else self.branches).add(key)
        elif name == "abort":
            key = self._there(name, key_of(body))
            self.crossing.discard(key)
            self.branches.discard(key)
            self.ends(key)
        self.worker.inbox.append(command)

    def credit(self, key: RequestKey, tokens: int) -> None:
        if self.facts is None:
            return
        self._there("credit", key)
        credit = worker_pb2.Credit(request_id=key.request_id, attempt=key.attempt, tokens=tokens)
        command = worker_pb2.SessionCommand(credits=worker_pb2.Credits(credits=[credit]))
        self.worker.inbox.append(command)

    def _there(self, name: str, key: RequestKey) -> RequestKey:
        there = self.given | self.crossing | self.branches
        assert key in there, f"{self.worker_id} is told to {name} {key}, which is not there"
        return key

    def ends(self, key: RequestKey) -> None:
        self.branches.discard(key)
        if key in self.given:
            self.given.remove(key)
            self.over.add(key)


@dataclass(eq=False)
class Job:
    """What the worker holds of a request. `phase`: ticket, prefill, sending or sequence."""

    session: Session
    request: Message
    phase: str
    index: int = 0
    window: int = 0
    ticket: kv_pb2.Ticket | None = None
    unwanted: set[RequestKey] = field(default_factory=set)

    @property
    def key(self) -> RequestKey:
        return key_of(self.request)

    @property
    def samples(self) -> list[Message]:
        """Who gets the first tokens."""
        made = []
        for branch in self.request.branches:
            sample = Message()
            sample.CopyFrom(self.request)
            del sample.branches[:]
            sample.request_id, sample.attempt, sample.sample = branch.request_id, branch.attempt, branch.sample
            made.append(sample)
        return [sample for sample in made or [self.request] if key_of(sample) not in self.unwanted]


class MemoryWorker:
    """One worker, through all its sessions.

    Args:
        listener: the dispatcher. peers: all workers by id, for transfers.
    """

    def __init__(
        self,
        worker_id: str,
        role: Role,
        listener: SessionListener,
        peers: dict[str, MemoryWorker],
        now: Callable[[], float],
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.session: Session | None = None
        self.draining = False
        self.inbox: deque[worker_pb2.SessionCommand] = deque()
        self.outbox: deque[worker_pb2.SessionEvent] = deque()
        self.holds: dict[RequestKey, Job] = {}
        self._listener = listener
        self._peers = peers
        self._now = now
        self._trunks: dict[RequestKey, list[RequestKey]] = {}  # with their branches, until the router knows
        self._progress = self._tickets = self._incarnation = 0

    # -- sessions ------------------------------------------------------------------------------------------------

    def connect(self, restarted: bool) -> Session:
        """A new session; what the worker held for the last one is released first."""
        assert self.session is None
        self.holds.clear()
        self._incarnation += restarted
        if restarted:
            self.draining = False
        member = membership_pb2.WorkerDescription(
            worker_id=self.worker_id, incarnation=str(self._incarnation), role=role_to_proto(self.role)
        )
        geometry = KvGeometry(MODEL.digest, 1, 1, 8, "float32", 16, 64)
        facts = WorkerFacts(self.worker_id, member.incarnation, self.role, MODEL, geometry, 6, 64, frozenset({"raw"}))
        load = WorkerLoad(free_blocks=64, total_blocks=64)
        self.session = Session(self, facts, member, load, self._now(), self.draining)
        return self.session

    def lose_session(self, reason: str) -> None:
        """The router has no session any more. The worker may not know: what it holds stays, and goes on."""
        session, self.session = self.session, None
        if session is not None:
            session.facts, session.problem = None, reason
            self.inbox.clear()
            self.outbox.clear()
            self._listener.on_lost(session, reason)  # type: ignore[arg-type]

    # -- commands ------------------------------------------------------------------------------------------------

    def take_command(self, refuse: worker_pb2.FailureCode.ValueType | None = None) -> None:
        """The next one; with `refuse`, or while draining, work is refused."""
        assert self.session is not None
        command = self.inbox.popleft()
        name = str(command.WhichOneof("command"))
        body = getattr(command, name)
        if name in ("abort", "credits"):
            for change in [body] if name == "abort" else body.credits:
                self._adjust(change)
            return
        request = body.request
        if self.draining:
            refuse = worker_pb2.FAILURE_CODE_DRAINING
        if refuse is not None:
            failed = worker_pb2.RequestFailed(code=refuse, message="refused")
            if name == "reserve":
                self._reply(worker_pb2.ReserveReply(**key_of(request)._asdict(), refused=failed))
            else:
                self._notice(self.session, key_of(request), failed=failed)
            return
        job = Job(self.session, request, {"reserve": "ticket", "prefill": "prefill"}.get(name, "sequence"))
        job.index, job.window = len(request.delivered), request.token_window
        if name == "prefill":
            job.ticket = body.ticket
        if name == "reserve":
            self._tickets += 1
            endpoint = kv_pb2.Endpoint(address=self.worker_id, ticket_id=self._tickets)
            job.ticket = kv_pb2.Ticket(num_tokens=len(request.prompt), endpoints=[endpoint])
            self._reply(worker_pb2.ReserveReply(**key_of(request)._asdict(), granted=job.ticket))
        assert job.key not in self.holds
        self.holds[job.key] = job

    def _adjust(self, body: worker_pb2.Abort | worker_pb2.Credit) -> None:
        job = self.holds.get(key_of(body))
        if isinstance(body, worker_pb2.Credit):
            if job is not None:
                job.window += body.tokens
                assert job.window <= job.request.token_window, "more credit than the window"
            return
        if job is not None:
            del self.holds[job.key]
        for trunk in self.holds.values():
            if key_of(body) in map(key_of, trunk.request.branches):
                trunk.unwanted.add(key_of(body))

    # -- work ----------------------------------------------------------------------------------------------------

    def ready(self) -> list[Job]:
        """Those that could go on."""
        return [job for job in self.holds.values() if job.phase != "ticket" and (job.window > 0 or job.index == 0)]

    def work(self, job: Job) -> None:
        """Its next step."""
        if job.phase == "sending":
            self._push(job)
        elif job.phase == "prefill":
            self._notice(job.session, job.key, prefill_done=worker_pb2.PrefillDone(compute_s=0.001))
            ended = [self._token(job.session, sample, job.index) for sample in job.samples]
            if all(ended):
                del self.holds[job.key]
            else:
                job.phase = "sending"
        elif job.request.branches:
            self._notice(job.session, job.key, prefill_done=worker_pb2.PrefillDone(compute_s=0.001))
            self._branch(job)
        else:
            job.window -= 1
            if self._token(job.session, job.request, job.index):
                del self.holds[job.key]
            job.index += 1

    def fail(self, job: Job, code: worker_pb2.FailureCode.ValueType) -> None:
        """It gives a request up."""
        del self.holds[job.key]
        failed = worker_pb2.RequestFailed(code=code, message="failed")
        self._notice(job.session, job.key, failed=failed)

    def _push(self, job: Job) -> None:
        """The manifest arrives, if the ticket is still what it was."""
        assert job.ticket is not None
        (endpoint,) = job.ticket.endpoints
        target = self._peers[endpoint.address]
        there = target.holds.get(job.key)
        if there is None or there.ticket is None or there.ticket.endpoints[0].ticket_id != endpoint.ticket_id:
            self.fail(job, worker_pb2.FAILURE_CODE_TRANSFER)
            return
        if there.phase != "ticket":
            return
        del self.holds[job.key]
        there.phase = "sequence"
        target._notice(
            there.session, there.key, kv_received=kv_pb2.TransferStats(raw_bytes=1, wire_bytes=1, seconds=1)
        )
        if there.request.branches:
            target._branch(there)

    def _branch(self, trunk: Job) -> None:
        del self.holds[trunk.key]
        self._trunks[trunk.key] = list(names_of(trunk.request))
        for sample in trunk.samples:
            self.holds[key_of(sample)] = Job(trunk.session, sample, "sequence", window=sample.token_window)

    def _token(self, session: Session, request: Message, index: int) -> bool:
        last = index + 1 >= request.sampling.max_tokens
        token = worker_pb2.TokenEvent(
            **key_of(request)._asdict(),
            index=index,
            token_id=null_token(request, index),
            finish=worker_pb2.TOKEN_FINISH_LENGTH if last else worker_pb2.TOKEN_FINISH_UNSPECIFIED,
        )
        self._say(session, worker_pb2.SessionEvent(report=worker_pb2.Report(tokens=[token])))
        return last

    def _notice(self, session: Session, key: RequestKey, **notice: object) -> None:
        said = worker_pb2.RequestNotice(**key._asdict(), **notice)  # type: ignore[arg-type]
        self._say(session, worker_pb2.SessionEvent(report=worker_pb2.Report(notices=[said])))

    def _reply(self, reply: worker_pb2.ReserveReply) -> None:
        assert self.session is not None
        self._say(self.session, worker_pb2.SessionEvent(reserve=reply))

    def _say(self, session: Session, event: worker_pb2.SessionEvent) -> None:
        if session is self.session:  # nobody hears what is said into a session that has ended
            self.outbox.append(event)

    # -- news ----------------------------------------------------------------------------------------------------

    def report(self, merge: bool) -> None:
        """The router hears the next news: a reply, and a report with one step's, or with `merge` of all since the
        last one. There may be none in it: a heartbeat."""
        session = self.session
        assert session is not None
        if self.outbox and self.outbox[0].HasField("reserve"):
            reply = self.outbox.popleft().reserve
            if reply.HasField("refused"):
                self._over(session, key_of(reply))
            self._listener.on_reserve_reply(session, reply)  # type: ignore[arg-type]
        report = worker_pb2.Report()
        while self.outbox and self.outbox[0].HasField("report"):
            report.MergeFrom(self.outbox.popleft().report)
            if not merge:
                break
        self._progress += 1
        used = sum(-(-(len(job.request.prompt) + job.index + 1) // 16) for job in self.holds.values())
        session.load = WorkerLoad(
            running=len(self.holds), free_blocks=max(0, 64 - used), total_blocks=64, progress=self._progress
        )
        session.load_at, session.draining = self._now(), self.draining
        over = [key_of(token) for token in report.tokens if token.finish]
        over += [key_of(notice) for notice in report.notices if notice.HasField("failed")]
        committed = [key_of(token) for token in report.tokens]
        for notice in report.notices:
            # Of a trunk that ran here as a whole the first is that its prompt is computed.
            if notice.HasField("kv_received") or (notice.HasField("prefill_done") and key_of(notice) in self._trunks):
                names = self._trunks.pop(key_of(notice), ())
                over += names[:1]
                alone = session.branches.intersection(names)
                session.branches -= alone
                session.given |= alone
                committed += names or [key_of(notice)]
        if len(report.tokens) + len(report.notices) > 1:
            session.crossing = session.given.intersection(over)
        for key in over:
            self._over(session, key)
        for key in committed:
            self._committed(key)
        self._listener.on_report(session, report)  # type: ignore[arg-type]
        session.crossing.clear()

    def _over(self, session: Session, key: RequestKey) -> None:
        """The worker says itself that it has nothing of it any more."""
        session.ends(key)
        assert key not in self.holds, f"{self.worker_id} says that {key} is over, and has it"

    def _committed(self, key: RequestKey) -> None:
        """News from the decode worker that end the prefill worker's part, which it knows without being told."""
        if self.role is not Role.PREFILL:
            for peer in self._peers.values():
                if peer.role is Role.PREFILL and peer.session is not None:
                    peer.session.ends(key)
