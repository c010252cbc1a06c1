"""A worker without a model: the real session and KV interfaces over real gRPC, tokens made from the prompt.

It answers as a worker does (tickets, echo of the first token, token windows, credit, heartbeats, release with the
session), computes nothing, and does what a test's hook says at each point of a request. Its KV transfer is a
manifest without frames.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from tokenizers import Tokenizer

from pdcore.security import InternalSecurity
from pdcore.types import PROTOCOL_VERSION, KvGeometry, ModelInfo, RequestKey, Role
from protos import kv_pb2, kv_pb2_grpc, membership_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import geometry_to_proto, model_to_proto, role_to_proto
from security.internal import Internal

Script = Callable[[worker_pb2.WorkerRequest, int], int]
Hook = Callable[[str, RequestKey, int], Awaitable[None]]
"""Called with a point, the request and a token index at: reserve, prefill, manifest, commit, token."""
Refuse = Callable[[str, worker_pb2.WorkerRequest], "worker_pb2.FailureCode.ValueType | None"]
"""Called with a command (reserve, prefill, generate): a code to refuse it, or None to take it."""

MODEL = ModelInfo(name="null", digest="0" * 16, max_model_len=4096, vocab_size=512, dtype="float32")


def null_token(request: worker_pb2.WorkerRequest, index: int) -> int:
    """A token below 94 that depends on prompt, index and sample only (printable in the tiny tokenizer)."""
    return token_of(tuple(request.prompt), index, request.sample)


def null_logprobs(start: int, token_ids: Sequence[int], top: int) -> worker_pb2.Logprobs:
    """Each token has half of the probability, the next one in the vocabulary a half of the rest, and so on."""
    values = [math.log(0.5 ** (rank + 1)) for rank in range(top)]
    return worker_pb2.Logprobs(
        start=start,
        top=top,
        values=[math.log(0.5)] * len(token_ids),
        top_ids=[token + rank for token in token_ids for rank in range(top)],
        top_values=values * len(token_ids),
    )


def token_of(prompt: tuple[int, ...], index: int, sample: int = 0) -> int:
    return zlib.crc32(repr((prompt, index, sample)).encode()) % 94


def saying(text: str, tokenizer: Tokenizer, end: int) -> Script:
    """A script that says this text, whatever the prompt, and then the end token."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, end]
    return lambda _, index: tokens[min(index, len(tokens) - 1)]


@dataclass(eq=False)
class _Job:
    """What the worker holds of one request. `phase`: ticket, prefill or sequence."""

    session: _Session
    request: worker_pb2.WorkerRequest
    phase: str
    blocks: int
    ticket_id: int = 0
    window: int = 0
    paused_at: float = 0.0
    credit: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    unwanted: set[RequestKey] = field(default_factory=set)  # branches that were aborted before there were any
    revoked: bool = False  # its ticket, for want of memory

    @property
    def samples(self) -> list[worker_pb2.WorkerRequest]:
        """The requests that get the first tokens: a trunk's branches, else its own."""
        samples = []
        for branch in self.request.branches:
            sample = worker_pb2.WorkerRequest()
            sample.CopyFrom(self.request)
            del sample.branches[:]
            sample.request_id, sample.attempt, sample.sample = branch.request_id, branch.attempt, branch.sample
            samples.append(sample)
        return samples or [self.request]

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request.request_id, self.request.attempt)

    @property
    def tokens(self) -> int:
        return len(self.request.prompt) + len(self.request.delivered) + 1


@dataclass(eq=False)
class _Session:
    report: worker_pb2.Report = field(default_factory=worker_pb2.Report)
    replies: list[worker_pb2.SessionEvent] = field(default_factory=list)
    mail: asyncio.Event = field(default_factory=asyncio.Event)


_STEPS = 64


class NullWorker(worker_pb2_grpc.WorkerServicer, kv_pb2_grpc.KvServicer):
    """Runs on the event loop of `start`.

    Attributes:
        held: what it holds, by request. commands: how often each command came, by (name, request id).
        sessions: that it ever had. silent: says nothing any more, heartbeats included, but keeps its connections.
        hung: its engine stands still: nothing runs, progress does not grow, but it goes on reporting.
        draining: what its reports say. cached_tokens: what it says of prompts.
    """

    def __init__(
        self,
        worker_id: str,
        role: Role,
        *,
        model: ModelInfo = MODEL,
        num_blocks: int = 4096,
        max_num_seqs: int = 1024,
        script: Script = null_token,
        hook: Hook | None = None,
        refuse: Refuse | None = None,
        step_s: float = 0.0,
        heartbeat_s: float = 0.1,
        stall_s: float = 1.0,
        codecs: tuple[str, ...] = ("raw",),
        security: InternalSecurity | None = None,
    ) -> None:
        self._internal = Internal(security or InternalSecurity())
        self.worker_id = worker_id
        self.role = role
        self.incarnation = uuid.uuid4().hex
        self.model = model
        self.geometry = KvGeometry(model.digest, 1, 1, 8, "float32", 16, num_blocks)
        self.held: dict[RequestKey, _Job] = {}
        self.commands: Counter[tuple[str, str]] = Counter()
        self.hook, self.refuse, self.script = hook, refuse, script
        self.step_s = step_s
        self.codecs = codecs
        self.max_num_batched_tokens = 512
        self.cached_tokens = 0
        self.sessions = 0
        self.silent = self.hung = self.draining = False
        self._max_num_seqs = max_num_seqs
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._step = 0
        self._tickets = 0
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._stopping: asyncio.Future[None] | None = None
        self.address = ""

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> NullWorker:
        self._server = grpc.aio.server(
            interceptors=self._internal.aio_interceptors(),
            options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)],
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        kv_pb2_grpc.add_KvServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._internal.add_port(self._server, '127.0.0.1:0')}"
        await self._server.start()
        return self

    async def crash(self) -> None:
        """Vanish in the middle of everything. May be called by a request's own hook, and again."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._server.stop(0))
        # The sessions' end cancels the requests' tasks: the one that called this must not take the stop with it.
        await asyncio.shield(self._stopping)

    stop = crash

    @property
    def description(self) -> membership_pb2.WorkerDescription:
        return membership_pb2.WorkerDescription(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=role_to_proto(self.role),
            address=self.address,
            model=model_to_proto(self.model),
            geometry=geometry_to_proto(self.geometry),
        )

    def count(self, command: str, request_id: str) -> int:
        return self.commands[command, request_id]

    async def GetSteps(
        self, request: worker_pb2.GetStepsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetStepsReply:
        if self.hung:
            await context.abort(grpc.StatusCode.INTERNAL, "nobody is at home")
        count = min(request.count, _STEPS)  # a worker keeps no more than so many, whatever is asked for
        return worker_pb2.GetStepsReply(steps=[worker_pb2.StepRecord(step=i + 1) for i in range(count)])

    # -- the session ---------------------------------------------------------------------------------------------

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        hello = (await context.read()).hello
        for name, ours, theirs in (
            ("worker incarnation", self.incarnation, hello.worker_incarnation or self.incarnation),
            ("model digest", self.model.digest, hello.model_digest or self.model.digest),
        ):
            if ours != theirs:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, f"{name} differs: ours is {ours!r}, theirs is {theirs!r}"
                )
        session = _Session()
        self.sessions += 1
        welcome = worker_pb2.Welcome(
            protocol=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            worker_incarnation=self.incarnation,
            role=role_to_proto(self.role),
            model=model_to_proto(self.model),
            geometry=geometry_to_proto(self.geometry),
            codecs=self.codecs,
            transports=["grpc"],
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self._max_num_seqs,
        )
        await context.write(worker_pb2.SessionEvent(welcome=welcome))
        writer = asyncio.create_task(self._write(session, context))
        try:
            while (command := await context.read()) is not grpc.aio.EOF:
                self._on_command(session, command)
        finally:
            writer.cancel()
            for job in [job for job in self.held.values() if job.session is session]:
                self._release(job)

    async def _write(self, session: _Session, context: grpc.aio.ServicerContext) -> None:
        while True:
            try:
                await asyncio.wait_for(session.mail.wait(), self._heartbeat_s)
            except TimeoutError:
                pass
            session.mail.clear()
            if self.silent:
                continue
            events, session.replies = session.replies, []
            report, session.report = session.report, worker_pb2.Report()
            report.load.CopyFrom(self._load())
            report.draining = self.draining
            for event in [*events, worker_pb2.SessionEvent(report=report)]:
                await context.write(event)

    def _load(self) -> worker_pb2.Load:
        # One pass: reports are many, and so may the requests be.
        since = time.monotonic() - self._stall_s
        sequences = paused = stalled = stalled_blocks = tickets = queued = used = 0
        for job in self.held.values():
            used += job.blocks
            if job.phase == "sequence":
                sequences += 1
                if job.window <= 0:
                    paused += 1
                    if 0 < job.paused_at <= since:
                        stalled += 1
                        stalled_blocks += job.blocks
            elif job.phase == "ticket":
                tickets += 1
            else:
                queued += job.tokens - 1
        if not self.hung:
            self._step += 1
        return worker_pb2.Load(
            step=self._step,
            progress=self._step,
            running=0 if self.hung else sequences - paused,
            paused=paused,
            queued_prefill_tokens=queued,
            free_blocks=max(0, self.geometry.num_blocks - used),
            total_blocks=self.geometry.num_blocks,
            open_tickets=tickets,
            stalled_requests=stalled,
            stalled_blocks=stalled_blocks,
        )

    def _on_command(self, session: _Session, command: worker_pb2.SessionCommand) -> None:
        name = command.WhichOneof("command")
        body = getattr(command, str(name))
        if name in ("reserve", "prefill", "generate"):
            self.commands[name, body.request.request_id] += 1
            code = self.refuse(name, body.request) if self.refuse is not None else None
            if code is not None:
                self._refuse(session, name, body.request, code)
                return
            phase = {"reserve": "ticket", "prefill": "prefill"}.get(name, "sequence")
            job = _Job(session, body.request, phase, self._blocks_of(body.request))
            job.window = body.request.token_window
            assert job.key not in self.held, f"{self.worker_id} was given {job.key} twice"
            self.held[job.key] = job
            work = {"reserve": self._grant, "prefill": self._prefill, "generate": self._generate}[name]
            job.task = asyncio.create_task(work(job, body))
        elif name == "abort":
            self.commands[name, body.request_id] += 1
            key = RequestKey(body.request_id, body.attempt)
            found = self.held.get(key)
            if found is None:
                self._abort_branch(key)
            else:
                self._release(found)
        elif name == "credits":
            for credit in body.credits:
                self.commands["credit", credit.request_id] += 1
                found = self.held.get(RequestKey(credit.request_id, credit.attempt))
                if found is not None:
                    found.window += credit.tokens
                    found.credit.set()

    def _blocks_of(self, request: worker_pb2.WorkerRequest) -> int:
        return self.geometry.blocks_for(len(request.prompt) + len(request.delivered) + 1)

    def _refuse(
        self,
        session: _Session,
        command: str,
        request: worker_pb2.WorkerRequest,
        code: worker_pb2.FailureCode.ValueType,
    ) -> None:
        failed = worker_pb2.RequestFailed(code=code, message="refused by the test")
        ids = {"request_id": request.request_id, "attempt": request.attempt}
        if command == "reserve":
            reply = worker_pb2.ReserveReply(**ids, refused=failed)
            session.replies.append(worker_pb2.SessionEvent(reserve=reply))
        else:
            session.report.notices.append(worker_pb2.RequestNotice(**ids, failed=failed))
        session.mail.set()

    def _release(self, job: _Job) -> None:
        if self.held.get(job.key) is job:
            del self.held[job.key]
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()

    # -- what requests do ----------------------------------------------------------------------------------------

    async def _at(self, point: str, job: _Job, index: int = 0) -> None:
        if self.hook is not None:
            await self.hook(point, job.key, index)

    async def _grant(self, job: _Job, _: worker_pb2.Reserve) -> None:
        await self._at("reserve", job)
        self._tickets += 1
        job.ticket_id = self._tickets
        ticket = kv_pb2.Ticket(
            num_tokens=job.tokens - 1,
            lease_s=10.0,
            codecs=["raw"],
            endpoints=[
                kv_pb2.Endpoint(
                    address=self.address,
                    transport="grpc",
                    head_count=1,
                    ticket_id=job.ticket_id,
                    generation=1,
                    worker_incarnation=self.incarnation,
                )
            ],
        )
        reply = worker_pb2.ReserveReply(request_id=job.key.request_id, attempt=job.key.attempt, granted=ticket)
        job.session.replies.append(worker_pb2.SessionEvent(reserve=reply))
        job.session.mail.set()

    async def _prefill(self, job: _Job, command: worker_pb2.Prefill) -> None:
        index = len(job.request.delivered)
        await self._at("prefill", job)
        if self.step_s:
            await asyncio.sleep(self.step_s)
        done = worker_pb2.PrefillDone(queued_s=0.001, compute_s=0.002, chunks=1, cached_tokens=self.cached_tokens)
        self._notice(job, prefill_done=done)
        self._score_prompt(job)
        samples = job.samples
        if all([self._token(job.session, sample, index) for sample in samples]):
            self._release(job)
            return
        await self._at("manifest", job)
        failed = await self._push(job, command.ticket, [self.script(sample, index) for sample in samples])
        if failed is not None:
            self._notice(job, failed=failed)
        self._release(job)

    async def _push(
        self, job: _Job, ticket: kv_pb2.Ticket, first_tokens: list[int]
    ) -> worker_pb2.RequestFailed | None:
        """Commit the ticket at the decode worker; returns what went wrong."""
        failed = worker_pb2.RequestFailed(code=worker_pb2.FAILURE_CODE_TRANSFER, message="the stream ended")
        (endpoint,) = ticket.endpoints
        ref = kv_pb2.TicketRef(ticket_id=endpoint.ticket_id, generation=endpoint.generation)
        manifest = kv_pb2.Manifest(
            ticket=ref,
            request_id=job.key.request_id,
            attempt=job.key.attempt,
            num_tokens=ticket.num_tokens,
            first_tokens=first_tokens,
        )
        async with self._internal.aio_channel(endpoint.address, ()) as channel:
            call = kv_pb2_grpc.KvStub(channel).Push(
                iter([kv_pb2.PushMessage(hello=kv_pb2.PushHello()), kv_pb2.PushMessage(manifest=manifest)]),
                metadata=self._internal.metadata,
            )
            try:
                async for reply in call:
                    if reply.HasField("committed"):
                        return None
                    if reply.HasField("refused"):
                        failed.message = reply.refused.reason
                        if reply.refused.revoked:
                            failed.code = worker_pb2.FAILURE_CODE_OVERLOADED
            except grpc.aio.AioRpcError as error:
                failed.message = str(error.details())
        return failed

    async def Push(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await context.read()
        await context.write(kv_pb2.PushReply(welcome=kv_pb2.PushWelcome(protocol=PROTOCOL_VERSION)))
        manifest = (await context.read()).manifest
        job = self.held.get(RequestKey(manifest.request_id, manifest.attempt))
        if job is None or job.phase != "ticket" or job.ticket_id != manifest.ticket.ticket_id:
            refused = kv_pb2.TicketRefused(ticket=manifest.ticket, reason="unknown ticket")
            await context.write(kv_pb2.PushReply(refused=refused))
            return
        await self._at("commit", job)
        if self.held.get(job.key) is not job:
            refused = kv_pb2.TicketRefused(ticket=manifest.ticket, reason="released", revoked=job.revoked)
            await context.write(kv_pb2.PushReply(refused=refused))
            return
        job.phase = "sequence"
        stats = kv_pb2.TransferStats(
            blocks=self.geometry.blocks_for(manifest.num_tokens),
            raw_bytes=manifest.num_tokens * self.geometry.bytes_per_token,
            wire_bytes=100,
            codec="raw",
            codec_reason="all it has",
            transport="grpc",
            seconds=0.001,
            frames=1,
        )
        self._notice(job, kv_received=stats)
        if job.request.branches:
            self._branch(job)
        else:
            job.task = asyncio.create_task(self._decode(job))
        await context.write(kv_pb2.PushReply(committed=kv_pb2.Committed(ticket=manifest.ticket)))

    async def _generate(self, job: _Job, _: worker_pb2.Generate) -> None:
        if job.request.branches:
            await self._at("prefill", job)
            self._notice(
                job,
                prefill_done=worker_pb2.PrefillDone(
                    queued_s=0.001, compute_s=0.002, chunks=1, cached_tokens=self.cached_tokens
                ),
            )
            self._branch(job)
        else:
            self._score_prompt(job)
            await self._decode(job)

    def _score_prompt(self, job: _Job) -> None:
        sampling, prompt = job.request.sampling, list(job.request.prompt)
        if sampling.HasField("prompt_logprobs") and len(prompt) > 1:
            self._notice(job, prompt_logprobs=null_logprobs(1, prompt[1:], sampling.prompt_logprobs))

    def _branch(self, trunk: _Job) -> None:
        """Put its branches in the place of a trunk."""
        for sample in trunk.samples:
            job = _Job(trunk.session, sample, "sequence", self._blocks_of(sample), window=sample.token_window)
            assert job.key not in self.held, f"{self.worker_id} was given {job.key} twice"
            if job.key not in trunk.unwanted:
                self.held[job.key] = job
                job.task = asyncio.create_task(self._decode(job))
        self._release(trunk)

    def _abort_branch(self, key: RequestKey) -> None:
        for job in self.held.values():
            if any((branch.request_id, branch.attempt) == key for branch in job.request.branches):
                job.unwanted.add(key)

    async def _decode(self, job: _Job) -> None:
        index = len(job.request.delivered)
        while True:
            while job.window <= 0:
                job.paused_at = time.monotonic()
                job.credit.clear()
                await job.credit.wait()
            await self._at("token", job, index)
            # Also lets the others run: no request may hog the loop.
            await asyncio.sleep(self.step_s)
            job.window -= 1
            if self._token(job.session, job.request, index):
                self._release(job)
                return
            index += 1

    def _token(self, session: _Session, request: worker_pb2.WorkerRequest, index: int) -> bool:
        """Report the token at `index`; True if it is the last."""
        sampling = request.sampling
        token = self.script(request, index)
        finish = worker_pb2.TOKEN_FINISH_UNSPECIFIED
        if token in sampling.stop_token_ids and index >= sampling.min_tokens:
            finish = worker_pb2.TOKEN_FINISH_STOP
        elif index + 1 >= sampling.max_tokens:
            finish = worker_pb2.TOKEN_FINISH_LENGTH
        wanted = sampling.HasField("logprobs")
        session.report.tokens.append(
            worker_pb2.TokenEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                index=index,
                token_id=token,
                finish=finish,
                logprobs=null_logprobs(index, [token], sampling.logprobs) if wanted else None,
            )
        )
        session.mail.set()
        return bool(finish)

    def _notice(self, job: _Job, **notice: object) -> None:
        job.session.report.notices.append(
            worker_pb2.RequestNotice(request_id=job.key.request_id, attempt=job.key.attempt, **notice)
        )
        job.session.mail.set()
