"""Carries out what the trackers decide: between the queue, the workers' sessions and the clients' streams."""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

from pdcore.clock import Clock
from pdcore.config import SHARING, RouterConfig
from pdcore.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    NoWorker,
    RequestError,
)
from pdcore.tracebacks import wordless
from pdcore.types import FinishReason, PriorityClass
from protos import kv_pb2, worker_pb2
from protos.convert import logprobs_from_proto, measured, spec_to_proto, stats_from_proto
from router import effects as effects_of
from router.active import ActiveRequest, Counters, SampleGroup, log_event
from router.admission import AdmissionQueue, QueueEntry
from router.admission_control import AdmissionControl
from router.effects import Effect
from router.links import Links
from router.policy import Mode, Route
from router.prefixes import Prefixes, PromptNames, lacking
from router.queue_pump import QueuePump
from router.ranking import USES_PREFIXES
from router.rebuild import TransferRates
from router.replay import Replays
from router.retry import RetryBudget
from router.stream import Chunk, RequestStream, Terminal
from router.text import TextStream
from router.tracker import FailureKind, RequestState, RequestTracker
from router.validation import GenerationRequest, id_in_use
from router.worker_client import WorkerClient
from router.worker_pool import WorkerPool
from security.internal import PLAIN, Internal

logger = logging.getLogger(__name__)

RECENT_IDS = 4096

_FINISH = {
    worker_pb2.TOKEN_FINISH_UNSPECIFIED: None,
    worker_pb2.TOKEN_FINISH_STOP: FinishReason.STOP,
    worker_pb2.TOKEN_FINISH_LENGTH: FinishReason.LENGTH,
}

_FAILURES = {
    worker_pb2.FAILURE_CODE_INVALID: FailureKind.INVALID,
    worker_pb2.FAILURE_CODE_OVERLOADED: FailureKind.BUSY,
    worker_pb2.FAILURE_CODE_DRAINING: FailureKind.BUSY,
    worker_pb2.FAILURE_CODE_TRANSFER: FailureKind.TRANSFER,
    worker_pb2.FAILURE_CODE_INTERNAL: FailureKind.BROKEN,
}


class RunningRequest:
    """A client call's handle on its request."""

    def __init__(self, dispatcher: Dispatcher, active: ActiveRequest) -> None:
        self._dispatcher = dispatcher
        self._active = active

    @property
    def request_id(self) -> str:
        return self._active.tracker.request_id

    @property
    def terminal(self) -> Terminal | None:
        """How it ended; None while it runs."""
        return self._active.stream.terminal

    async def ready(self) -> None:
        """Until there is a chunk to take."""
        await self._active.stream.ready()

    def take(self) -> Chunk:
        """The next chunk; the one with the end is the last."""
        return self._active.stream.take()

    def took(self, tokens: int) -> None:
        """The client has taken `tokens` more tokens."""
        active = self._active
        effects = active.tracker.took(tokens)
        if effects:
            self._dispatcher.perform(active, effects)

    def cancel(self) -> None:
        """The client went away. No effect after the end."""
        self._dispatcher.cancel_active(self._active)


class Dispatcher:
    """Owns the requests that are waiting or running. Everything happens on one event loop.

    Implements `SessionListener` for the sessions of its `pool`.

    Args:
        on_change: called when workers came or went, or draining began.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        *,
        incarnation: str,
        on_change: Callable[[], None],
        internal: Internal = PLAIN,
    ) -> None:
        self.pool = WorkerPool(config, incarnation, self, clock, self._workers_changed, internal=internal)
        self.counters = Counters()
        self._rates = TransferRates()
        self._links = Links()
        self.draining = False
        self._config = config
        self._clock = clock
        self._on_change = on_change
        self._queue = AdmissionQueue(config.max_queue, config.queue, config.max_queue_by_class)
        self._active: dict[str, ActiveRequest] = {}
        self.admission = AdmissionControl(config, self._queue, self.pool, self._active, clock)
        self._groups: dict[str, SampleGroup] = {}  # by the id that their client knows
        self._last_attempts: OrderedDict[str, int] = OrderedDict()
        self._prefixes = Prefixes(clock, self.pool.numbers)
        budget = RetryBudget(config.replay_share, config.replays_per_s, clock.now())
        self._pump = QueuePump(
            self._queue,
            self.pool,
            self._active,
            self._prefixes,
            clock,
            admission=self.admission,
            policy=config.policy,
            disaggregate=config.disaggregate,
            rates=self._rates,
            links=self._links,
            no_route_grace_s=config.worker_wait_s,
            seed=crc32(config.router_id.encode()),
            counters=self.counters,
            first_start=lambda: budget.started(clock.now()),
            perform=self.perform,
            abandon=self._abandon,
            bug=self._bug,
        )
        self._replays = Replays(
            self._queue,
            self.pool,
            self._rates,
            self.counters,
            clock,
            budget=budget,
            perform=self.perform,
            run_soon=self._pump.run_soon,
        )
        self._idle = asyncio.Event()
        self._idle.set()

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def request_ids(self) -> Collection[str]:
        """Ids of the requests that have not ended, and of their samples."""
        return ChainMap[str, Any](self._active, self._groups)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def waiting_of(self, priority: PriorityClass) -> int:
        """Requests of the class that wait for a worker."""
        return self._queue.waiting_of(priority)

    @property
    def running(self) -> int:
        joined = sum(active.trunk is not None for active in self._active.values())  # counted as their trunk
        return len(self._active) - len(self._queue) - joined

    def submit(
        self, request: GenerationRequest, texts: Sequence[TextStream], deadline: float | None
    ) -> list[RunningRequest]:
        """Begin a request.

        Args:
            texts: of its samples. deadline: on the clock, in seconds; None if the client set none.

        Returns:
            Its samples.

        Raises:
            Draining. NoWorker: none could run it. InvalidRequest: its id is in use.
            RateLimited, Overloaded: see `AdmissionControl.admit`.
        """
        if self.draining:
            raise Draining("the router is draining")
        if request.request_id in self.request_ids:
            raise id_in_use(request.request_id)
        if not self.pool.route_possible:
            raise NoWorker("no worker is connected")
        names = PromptNames(request.prompt, request.cache_salt)
        tokens = len(request.prompt)
        # What has to be computed: all of it where prompt tokens are scored.
        by_tokens = self._config.queue.policy in ("sjf", *SHARING) or self._config.policy in USES_PREFIXES
        if by_tokens and request.params.prompt_logprobs is None:
            tokens = lacking(tokens, self._prefixes.cached(names))
        entry, charge = self.admission.admit(request, tokens, deadline)
        first = self._begin(request, entry, RequestStream(texts[0]), names)
        first.charge = charge
        samples = [first] if len(texts) == 1 else self._begin_samples(request, first, texts)
        if deadline is not None:
            loop, delay = asyncio.get_running_loop(), max(0.0, deadline - self._clock.now())
            for active in samples:
                active.deadline = loop.call_later(delay, self._deadline_passed, active)
                active.ends_at = loop.time() + delay
        log_event(
            logging.INFO,
            "request admitted",
            first,
            prompt_tokens=len(request.prompt),
            max_tokens=request.params.max_tokens,
            samples=len(samples),
            priority=request.priority.name.lower(),
            tenant=request.tenant,
        )
        self._pump.run()
        return [RunningRequest(self, active) for active in samples]

    def _begin(
        self,
        request: GenerationRequest,
        entry: QueueEntry,
        stream: RequestStream,
        names: PromptNames,
        sample: int = 0,
    ) -> ActiveRequest:
        params = request.params
        if sample:
            params = replace(params, prompt_logprobs=None)  # the first one has them
        tracker = RequestTracker(
            request_id=entry.request_id,
            prompt=request.prompt,
            params=params,
            token_window=self._config.token_window,
            max_replays=self._config.max_replays,
            sink=stream,
            now=self._clock.now(),
            last_attempt=self._last_attempts.get(request.request_id, 0),
            kv_codec=request.kv_codec or getattr(self._config.kv_codec_by_class, request.priority.name.lower()),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            priority=request.priority,
            sample=sample,
        )
        active = self._active[entry.request_id] = ActiveRequest(tracker, stream, entry, names)
        self._idle.clear()
        return active

    def _begin_samples(
        self, request: GenerationRequest, trunk: ActiveRequest, texts: Sequence[TextStream]
    ) -> list[ActiveRequest]:
        """Samples that begin as `trunk`, which is in the queue. Clients' ids have no ``#``."""
        group = self._groups[request.request_id] = SampleGroup(trunk)
        for number, text in enumerate(texts):
            entry = self._queue.sample_of(trunk.entry, f"{request.request_id}#{number}")
            group.add(self._begin(request, entry, RequestStream(text), trunk.names, number))
        return group.running

    def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """End a request by its id, if it is the tenant's (None: anybody's); False if there is none that runs.

        The ids of samples are ours alone.
        """
        running = self._samples_of(request_id)
        if tenant is not None and any(one.entry.tenant != tenant for one in running):
            return False
        for one in running:
            self.cancel_active(one)
        return bool(running)

    def abandon(self, request_id: str, error: RequestError) -> None:
        """End a request by an error, if it runs."""
        for one in self._samples_of(request_id):
            self._abandon(one, error)

    def _samples_of(self, request_id: str) -> list[ActiveRequest]:
        group, active = self._groups.get(request_id), self._active.get(request_id)
        if group is not None:
            return group.running
        return [] if active is None or active.group is not None else [active]

    def cancel_active(self, active: ActiveRequest) -> None:
        self.perform(active, active.tracker.cancel(self._clock.now()))

    def _deadline_passed(self, active: ActiveRequest) -> None:
        state = active.tracker.state.value
        self._abandon(active, DeadlineExceeded(f"the deadline passed while the request was {state}"))

    def _abandon(self, active: ActiveRequest, error: RequestError) -> None:
        self.perform(active, active.tracker.abandon(error, self._clock.now()))

    # -- the end of serving --------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self._on_change()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others, then cancel what is left. True if nothing was left."""
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        left = list(self._active.values())
        for active in left:
            self._abandon(active, Draining("the router is shutting down"))
        return not left

    async def stop(self) -> None:
        """End what still runs, then the sessions."""
        await self.drain(0.0)
        self._pump.stop()
        await self.pool.stop()

    # -- news from workers (SessionListener) ---------------------------------------------------------------------

    def expected_digest(self) -> str:
        model = self.pool.model
        return "" if model is None else model.digest

    def on_connected(self, client: WorkerClient) -> None:
        assert client.facts is not None
        geometry = client.facts.geometry
        self.pool.connected(client)
        self._prefixes.connected(client.worker_id, (geometry.model_digest, geometry.block_size))

    def on_lost(self, client: WorkerClient, reason: str) -> None:
        now = self._clock.now()
        self._prefixes.lost(client.worker_id)
        if client.worker_id in self.pool.numbers:
            self._links.forget(self.pool.numbers.take(client.worker_id))
        self.pool.lost(client, reason)
        for active in list(self._active.values()):
            with self._guard(active):
                lost = active.tracker.worker_lost(client.worker_id, f"{client.worker_id}: {reason}", now)
                self.perform(active, lost)

    def on_reserve_reply(self, client: WorkerClient, reply: worker_pb2.ReserveReply) -> None:
        active = self._active.get(reply.request_id)
        if active is None:
            return
        with self._guard(active):
            self._on_reserve(active, client.worker_id, reply)

    def _on_reserve(self, active: ActiveRequest, worker_id: str, reply: worker_pb2.ReserveReply) -> None:
        if reply.WhichOneof("result") == "granted":
            if reply.granted.run_here:
                declined = active.tracker.reserve_declined(worker_id, reply.attempt)
                if declined is not None:
                    self.perform(active, declined)
                    for sample in active.branches:
                        if sample.trunk is not None:
                            self.perform(sample, sample.tracker.part())
                    ticket = reply.granted
                    lacking = max(1, ticket.num_tokens - ticket.prefix_tokens)
                    route = Route(Mode.LOCAL, worker_id, None, "cached_there", lacking=lacking)
                    self._pump.start(active, route, self._clock.now())
                    return
            granted = active.tracker.reserve_granted(worker_id, reply.attempt)
            if granted:
                for sample in _parts(active, reply.attempt)[:-1]:
                    sample.tracker.trunk_granted()
            self.perform(active, granted, reply.granted)
            return
        kind = _failure_kind(reply.refused)
        if kind is FailureKind.BUSY and self._is_idle_but_for(worker_id):
            # A pool with nothing in it has no room for a reservation of this size and never will have.
            active.local_only = True
        now = self._clock.now()
        refused = active.tracker.reserve_refused(worker_id, reply.attempt, kind, reply.refused.message, now)
        self.perform(active, refused)

    def on_report(self, client: WorkerClient, report: worker_pb2.Report) -> None:
        now, worker_id = self._clock.now(), client.worker_id
        self.pool.reported(client)
        if report.HasField("cache"):
            self._prefixes.hear(worker_id, report.cache)
        # News of a finished phase first, since a token may end the request; failures last, since tokens came before.
        for notice in report.notices:
            if not notice.HasField("failed"):
                self._on_phase(worker_id, notice)
        for token in report.tokens:
            active = self._active.get(token.request_id)
            if active is None:
                continue
            tracker = active.tracker
            before = len(tracker.delivered)
            try:
                effects = tracker.token(
                    worker_id,
                    token.attempt,
                    token.index,
                    token.token_id,
                    _FINISH.get(token.finish),
                    now=now,
                    logprobs=logprobs_from_proto(token.logprobs) if token.HasField("logprobs") else None,
                )
            except Exception as error:  # noqa: BLE001  # one request's bug must not end the session of all
                self._bug(active, error)
                continue
            if len(tracker.delivered) > before:
                self._queue.generated(active.entry, len(tracker.delivered) - before)
                if not before:
                    self.admission.first_token(active)
            if effects:
                self.perform(active, effects)
        for notice in report.notices:
            if notice.HasField("failed"):
                self._on_failed(worker_id, notice)
        self._pump.run_soon()

    def _on_phase(self, worker_id: str, notice: worker_pb2.RequestNotice) -> None:
        active, group = self._active.get(notice.request_id), self._groups.get(notice.request_id)
        if group is not None:
            active = group.trunk  # it may have branched already by what another worker said
        if active is None:
            return
        with self._guard(active):
            if notice.HasField("prefill_done"):
                done = notice.prefill_done
                queued_s, compute_s = measured(done.queued_s), measured(done.compute_s)
                for part in _parts(active, notice.attempt):
                    told = part.tracker.prefill_done(
                        worker_id, part.tracker.attempt, queued_s, compute_s, done.cached_tokens
                    )
                    self.perform(part, told)
                role = self.pool.role_of(worker_id)
                if role is not None:
                    tokens = len(active.tracker.prompt) - done.cached_tokens
                    self._rates.prefilled(role, tokens, compute_s)
            elif notice.HasField("prompt_logprobs"):
                logprobs = logprobs_from_proto(notice.prompt_logprobs)
                for part in [part for part in _parts(active, notice.attempt) if part.tracker.sample == 0][:1]:
                    now = self._clock.now()
                    told = part.tracker.prompt_logprobs(worker_id, part.tracker.attempt, logprobs, now)
                    self.perform(part, told)
            elif notice.HasField("kv_received"):
                stats, tokens = stats_from_proto(notice.kv_received), len(active.tracker.prompt)
                self._rates.transferred(stats, tokens)
                for part in _parts(active, notice.attempt)[:1]:
                    timeline, numbers = part.tracker.timeline, self.pool.numbers
                    if timeline.first_token is not None:
                        self._rates.exposed(self._clock.now() - timeline.first_token, tokens)
                    if timeline.prefill_worker in numbers and worker_id in numbers:
                        ms = 1000 * stats.seconds / tokens
                        self._links.seen(numbers.take(timeline.prefill_worker), numbers.take(worker_id), ms)
                for part in _parts(active, notice.attempt):
                    self.perform(part, part.tracker.kv_received(worker_id, part.tracker.attempt, stats))

    def _on_failed(self, worker_id: str, notice: worker_pb2.RequestNotice) -> None:
        active = self._active.get(notice.request_id)
        if active is None:
            return
        with self._guard(active):
            kind, message = _failure_kind(notice.failed), f"{worker_id}: {notice.failed.message}"
            failed = active.tracker.failed(worker_id, notice.attempt, kind, message, now=self._clock.now())
            # Here, and not where it is run again: it counts even if it was the last try.
            self.counters.failed_transfers += bool(failed) and kind is FailureKind.TRANSFER
            self.perform(active, failed)

    def _is_idle_but_for(self, worker_id: str) -> bool:
        """Whether the worker has nothing of anybody, but one request of ours."""
        snapshot = self.pool.snapshot(worker_id)
        if snapshot is None:
            return False
        load = snapshot.load
        nothing = load.waiting + load.running + load.paused + load.open_tickets == 0
        return nothing and load.free_blocks == load.total_blocks and snapshot.mine.requests <= 1

    # -- effects -------------------------------------------------------------------------------------------------

    def perform(self, active: ActiveRequest, effects: Sequence[Effect], ticket: kv_pb2.Ticket | None = None) -> None:
        """Carry out what a tracker decided, in order. `ticket` belongs to a SendPrefill among the effects."""
        for effect in effects:
            try:
                self._perform(active, effect, ticket)
            except Exception as error:  # noqa: BLE001  # one request's bug must not take others with it
                self._bug(active, error)

    def _perform(self, active: ActiveRequest, effect: Effect, ticket: kv_pb2.Ticket | None) -> None:
        match effect:
            case effects_of.SendCredit(worker_id, key, tokens):
                self.pool.credit(worker_id, key, tokens)
            case effects_of.SendReserve(worker_id, spec):
                request = spec_to_proto(spec)
                active.reserved = spec, request
                reserve = worker_pb2.Reserve(request=request)
                self.pool.send(worker_id, worker_pb2.SessionCommand(reserve=reserve))
            case effects_of.SendPrefill(worker_id, spec):
                assert ticket is not None
                reserved, active.reserved = active.reserved, None
                request = reserved[1] if reserved is not None and reserved[0] == spec else spec_to_proto(spec)
                prefill = worker_pb2.Prefill(request=request, ticket=ticket)
                self.pool.send(worker_id, worker_pb2.SessionCommand(prefill=prefill))
            case effects_of.SendGenerate(worker_id, spec):
                generate = worker_pb2.Generate(request=spec_to_proto(spec))
                self.pool.send(worker_id, worker_pb2.SessionCommand(generate=generate))
            case effects_of.PrefillComputed(worker_id, key):
                self.pool.prefill_computed(worker_id, key)
            case effects_of.Release(worker_id, key):
                self.pool.release(worker_id, key, served=effect.served, peer=effect.peer)
                active.reserved = None  # as long as the prompt, and of no use to another attempt
                if effect.abort:
                    reason = effect.reason
                    order = worker_pb2.Abort(request_id=key.request_id, attempt=key.attempt, reason=reason)
                    self.pool.send(worker_id, worker_pb2.SessionCommand(abort=order))
            case effects_of.WorkerFailed(worker_id, key, reason, pair):
                self.pool.failed(worker_id, key, reason, pair)
            case effects_of.Requeue():
                self._replays.requeue(active, effect)
            case effects_of.Ended(outcome):
                self._ended(active, outcome)

    def _ended(self, active: ActiveRequest, outcome: effects_of.Outcome) -> None:
        tracker = active.tracker
        self._queue.remove(tracker.request_id)
        self._replays.ended(active)
        if active.deadline is not None:
            active.deadline.cancel()
        del self._active[tracker.request_id]
        name = tracker.request_id if active.group is None else active.group.trunk.tracker.request_id
        # One entry for all samples: they may have come to different attempts, and none is to be used again.
        self._last_attempts[name] = max(tracker.attempt, self._last_attempts.get(name, 0))
        if len(self._last_attempts) > RECENT_IDS:
            self._last_attempts.popitem(last=False)
        if active.branches:
            self._trunk_ended(active, outcome)
            return
        if outcome.error is None:
            self.counters.finished += 1
        else:
            self.counters.failed += 1
        timeline = tracker.timeline
        log_event(
            logging.INFO,
            "request ended",
            active,
            finish=outcome.finish.value,
            error="" if outcome.error is None else type(outcome.error).__name__,
            completion_tokens=len(tracker.delivered),
            mode=timeline.mode,
            prefill_worker=timeline.prefill_worker,
            decode_worker=timeline.decode_worker,
            replays=timeline.replays,
        )
        active.stream.end(Terminal(outcome, len(tracker.prompt), len(tracker.delivered), timeline))
        self.admission.ended(active, outcome)
        if active.group is not None:
            self._sample_ended(active.group)
        self._one_less()

    def _trunk_ended(self, trunk: ActiveRequest, outcome: effects_of.Outcome) -> None:
        """It has branched, or cannot: then the samples that wait for it end as it did."""
        waiting = [sample for sample in trunk.branches if sample.trunk is not None]
        for sample in waiting:
            sample.trunk = None
            if outcome.error is not None:
                self._abandon(sample, outcome.error)
            if sample.tracker.state is not RequestState.ENDED:
                self._queue.goes_on(sample.entry)
            for worker_id in sample.tracker.holders:
                priority = sample.entry.priority
                self.pool.assign(worker_id, sample.tracker.key, prefill_tokens=0, cache_tokens=1, priority=priority)
        self._one_less()

    def _sample_ended(self, group: SampleGroup) -> None:
        trunk = group.trunk
        if not group.running:
            self._groups.pop(trunk.tracker.request_id, None)
        if not any(sample.trunk is not None for sample in group.running):
            self.perform(trunk, trunk.tracker.dissolve(self._clock.now()))

    def _one_less(self) -> None:
        """A request has ended: there is room, or nothing left."""
        if not self._active:
            self._idle.set()
        self._pump.run_soon()

    def _workers_changed(self) -> None:
        self._pump.workers_changed()
        self._on_change()

    @contextmanager
    def _guard(self, active: ActiveRequest) -> Iterator[None]:
        """One request's bug ends that request, not the session of all. The hot path of tokens does it itself."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # see above
            self._bug(active, error)

    def _bug(self, active: ActiveRequest, error: Exception) -> None:
        request_id = active.tracker.request_id
        about = {"request_id": request_id}
        logger.error("internal error in request %s", request_id, exc_info=wordless(error), extra=about)
        if active.tracker.state is not RequestState.ENDED:
            self._abandon(active, InternalError(f"internal error; request id {request_id}"))


def _parts(active: ActiveRequest, attempt: int) -> list[ActiveRequest]:
    """Whom news of an attempt concerns: of a trunk its samples first, and last itself, which may end by it."""
    if attempt != active.tracker.attempt:
        return []
    return [*(sample for sample in active.branches if sample.joined == sample.tracker.attempt), active]


def _failure_kind(failure: worker_pb2.RequestFailed) -> FailureKind:
    return _FAILURES.get(failure.code, FailureKind.BROKEN)
