"""The engine: sequences, block ownership and the step, behind one lock. It knows no transport and no router."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.batch import Part, build_step
from engine.blocks import BlockManager, Owner, OwnerKind
from engine.displacement import kept_batch, standing_claim
from engine.integrity import check_engine
from engine.plan import Chunk, PrefillStats, PromptLogprobs, StepPlan, StepResult, TokenOut
from engine.preemption import DECODE_WEIGHT
from engine.prefix_cache import CacheEvents
from engine.samples import share_out
from engine.scheduler import ScheduleDecision, SchedulerSnapshot, ticket_lacks, ticket_refusal, tickets_are_full
from engine.scheduler import schedule as decide
from engine.scoring import ScoredSpan, of_sample, of_spans
from engine.sequence import Sequence, SequenceKind, SequenceState
from engine.snapshot import StalledCount, may_yield, queued_prefill_tokens, take_snapshot
from engine.step import NO_TOKEN, KvCache, ModelRunner, StepOutput, StepProgress
from engine.step_log import StepLog, StepRecord, by_class
from engine.structured import OutputGuards, OutputState
from engine.swap import Copier, Copy, SwapSpace, ThreadCopier
from engine.ticket import Claims, Reservation, Ticket
from engine.validation import check_request
from pdcore.clock import Clock, MonotonicClock
from pdcore.config import EngineConfig
from pdcore.errors import InternalError, InvalidRequest, PdserveError, TicketError
from pdcore.hashing import block_hashes, chain_root
from pdcore.logprobs import Logprobs
from pdcore.placement import run_rest_here
from pdcore.queueing import QueueBook, Waiting
from pdcore.types import KvGeometry, ModelInfo, PriorityClass, RequestKey, RequestSpec, WorkerLoad

__all__ = ["Chunk", "Engine", "PrefillStats", "Reservation", "SequenceKind", "StepPlan", "StepResult", "TokenOut"]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The step between `schedule` and `apply`: its sequences' blocks may be written at any moment."""

    plan: StepPlan
    sampled: tuple[RequestKey, ...]  # in the order of the runner's output
    scored: tuple[ScoredSpan, ...]  # likewise
    keys: frozenset[RequestKey]
    record: StepRecord


def _logprob_rows(plan: StepPlan, flight: _InFlight) -> dict[RequestKey, int]:
    """Which row of the step's log-probabilities belongs to whom."""
    wanted = plan.step_input.logprobs
    if wanted is None:
        return {}
    keys = [key for key, top in zip(flight.sampled, wanted.tolist(), strict=True) if top >= 0]
    return {key: row for row, key in enumerate(keys)}


def _no_pressure(owner: str) -> None:
    """For engines whose tickets are never revoked: they go by commit, release or lease."""


def _nothing(*_: object) -> None:
    """For engines that are stepped by whoever uses them: nobody waits to be told."""


MakeCopier = Callable[[KvCache, Callable[[Copy], None], Callable[[BaseException], None]], Copier]


class Engine:
    """Runs sequences of one model on one paged cache.

    A step is ``plan = schedule()``, ``output = execute(plan)``, ``result = apply(plan, output)``, from one thread.
    Every other method may be called from any thread at any time, also while `execute` runs: what such a call frees
    of the executing step's blocks is freed in `apply`.

    Args:
        runner: owns weights and cache.
        config: `block_size` and `num_blocks` are the runner's.
        on_pressure: called with a ticket's owner when its blocks are wanted, from `schedule`, without the lock. It
            must see to it that `release_ticket` (or `commit_ticket`) follows soon, and must not raise.
        max_reserved_fraction: share of the blocks that uncommitted tickets may hold.
        guards: of structured outputs; without them, requests for one are refused.
        prefer_swap: computing tokens again is worse here than the time that it takes (see `engine.preemption`).
        on_copied: called when a copy to or from host memory has ended, so that `schedule` may find more to run.
        on_crash: called if no more such copies can be made. Both come from a thread of the engine's own, without
            the lock.
        make_copier: makes what runs the copies, if there is host memory; tests put one here that they drive by hand.

    `close` ends that thread.

    Raises:
        ConfigError: `swap_memory` does not hold one block.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Clock | None = None,
        on_pressure: Callable[[str], None] = _no_pressure,
        max_reserved_fraction: float = 0.5,
        *,
        guards: OutputGuards | None = None,
        prefer_swap: bool = False,
        on_copied: Callable[[], None] = _nothing,
        on_crash: Callable[[BaseException], None] = _nothing,
        make_copier: MakeCopier = ThreadCopier,
    ) -> None:
        self.lock = threading.RLock()
        self.model: ModelInfo = runner.model
        self.geometry: KvGeometry = runner.geometry
        self.progress: StepProgress = runner.progress
        self.max_model_len = min(config.max_model_len or runner.model.max_model_len, runner.model.max_model_len)
        self._runner = runner
        self._scheduler_config = config.scheduler
        self._clock: Clock = clock or MonotonicClock()
        self._on_pressure = on_pressure
        self._guards = guards
        self._max_reserved = int(max_reserved_fraction * runner.geometry.num_blocks)
        self._blocks = BlockManager(runner.geometry.num_blocks, runner.geometry.block_size)
        self._block_size = runner.geometry.block_size
        self._prefix_cache = config.prefix_cache
        self._unborn: dict[RequestKey, Sequence] = {}  # samples whose prompt is being computed, and as what
        self._sequences: dict[RequestKey, Sequence] = {}  # oldest first
        self._tickets: dict[str, Ticket] = {}  # oldest first
        self._deferred: list[Owner] = []  # freed when the step in flight is applied
        self._echoes: list[TokenOut] = []  # first tokens of commits, reported by the next result
        self._in_flight: _InFlight | None = None
        self._step_id = 0
        self._steps_done = 0
        self._arrivals = 0
        self._queue = QueueBook(config.scheduler.queue)
        self._log = StepLog()
        self._on_copied = on_copied
        self._swap = SwapSpace(
            self._blocks,
            runner.geometry,
            config,
            recompute_weight=DECODE_WEIGHT if prefer_swap else 1.0,
            make_copier=lambda: make_copier(runner.cache, self._copied, on_crash),
        )
        self._wanted_blocks = 0  # what a ticket lacked that was refused since the last step
        self._stalled = StalledCount()
        self._claims = Claims()
        self._preemptions = 0
        self._recomputed = {"preempt": 0, "rebuild": 0, "revoked": 0, "replay": 0}
        self._cached_tokens = 0

    # ------------------------------------------------------------------------------------------------- requests

    def check_runnable(self, spec: RequestSpec, kind: SequenceKind = SequenceKind.GENERATE) -> None:
        """Raise InvalidRequest, naming the field, if the request can never run here. Compiles a structured output
        that is new here: call it without a lock that the step loop needs."""
        check_request(spec, kind, self.model.vocab_size, self.max_model_len, self._blocks)
        output = spec.params.structured_output
        if output is not None:
            if self._guards is None:
                raise InvalidRequest(output.field, "this worker's model has no tokenizer that could be used for it")
            self._guards.check(output)

    def add(self, spec: RequestSpec, kind: SequenceKind) -> None:
        """Queue a request. Raises InvalidRequest if it can never run here, or if its key is in use."""
        self.check_runnable(spec, kind)
        sequence = self._new_sequence(spec, kind)
        sequence.outputs = self._start_outputs(spec)
        sequence.name_blocks(sequence.may_hit)  # now, for it takes a while with a long prompt, and needs no lock
        with self.lock:
            self._check_new(spec)
            self._enter(sequence)

    def abort(self, key: RequestKey) -> bool:
        """End a sequence, whatever its state; no token of it is reported any more.

        A PREFILL sequence's blocks pass to the send session and stay until `release_send`. Returns False if there is
        no such sequence (never was, or its last token has been reported).
        """
        with self.lock:
            news = len(self._echoes)
            self._echoes = [echo for echo in self._echoes if echo.key != key]
            sequence = self._sequences.get(key)
            if sequence is None:  # it may have ended by the first token of its commit, which nobody has heard of
                return len(self._echoes) < news or self._abort_unborn(key)
            sequence.abort()
            self._leave(sequence)
            return True

    def add_credit(self, key: RequestKey, tokens: int) -> None:
        """The client took `tokens` tokens. Ignored if the sequence is unknown (it may just have finished)."""
        with self.lock:
            sequence = self._sequences.get(key)
            if sequence is not None:
                sequence.add_credit(tokens)

    # -------------------------------------------------------------------------------------------------- tickets

    def reserve(self, owner: str, spec: RequestSpec) -> Reservation | None:
        """Take blocks for the KV of ``spec.known_tokens``, which will come from elsewhere, and for the first token
        computed here, of each sample. What the prefix cache has of it is shared, and pinned until the ticket ends.

        Returns None if the ticket is refused now. Raises TicketError if `owner` has one already.
        """
        known = len(spec.known_tokens)
        ticket = Ticket(spec, self._names(spec), outputs=self._start_outputs(spec))
        # Where prompt tokens are scored all of them are computed, so all that is held here would be for nothing.
        may_hit = 0 if spec.params.prompt_logprobs is not None else (known - 1) // self._block_size
        with self.lock:
            hits = self._blocks.cache.match(ticket.hashes, min(len(ticket.hashes), may_hit))
            # Before the ticket is open: its own tokens are to come from elsewhere.
            queued = queued_prefill_tokens(self._sequences, self._block_size)
            blocks = self._open_ticket(owner, ticket, known, hits)
            if blocks is None:
                return None
            del blocks[self._blocks.blocks_for(known + 1) :]  # those of the other samples
            held = hits * self._block_size
            limit = self._scheduler_config.local_prefill_tokens
            return Reservation(blocks, held, run_rest_here(known - held, held, queued, limit))

    def reserve_ticket(self, owner: str, num_tokens: int) -> list[int] | None:
        """As `reserve`, for a request of which only the number of tokens is known: nothing of it is shared."""
        assert num_tokens >= 1, num_tokens
        with self.lock:
            return self._open_ticket(owner, Ticket(None, []), num_tokens, hits=0)

    def _open_ticket(self, owner: str, ticket: Ticket, num_tokens: int, hits: int) -> list[int] | None:
        if owner in self._tickets:
            raise TicketError(f"ticket {owner} is already open")
        cached = self._blocks.cache.blocks(ticket.hashes, hits)
        fresh = self._blocks.blocks_for(num_tokens + 1) - hits + len(ticket.outputs) - 1
        idle = hits - len(self._blocks.used(cached))
        snapshot = self._snapshot()
        # Claims go before all other tickets, those of interactive requests among themselves in order.
        name = ticket.claimant if self._scheduler_config.queue.policy == "priority" else ""
        ahead = self._claims.ahead(name)
        claimed = standing_claim(snapshot, self._scheduler_config, ahead.claims)
        refusal = ticket_refusal(
            snapshot, fresh, self._max_reserved, idle, claimed_blocks=claimed, claimed_share=ahead.share
        )
        if refusal is not None:
            # The router asks again: perhaps sequences of stalled clients have made room by then.
            self._wanted_blocks = max(self._wanted_blocks, ticket_lacks(snapshot, fresh, idle))
            if name:
                full = tickets_are_full(snapshot, fresh + ahead.share, self._max_reserved)
                names = ticket.hashes[:hits]
                now = self._clock.now()
                self._claims.make(name, fresh + hits, now, memory=not full, fresh=fresh, names=names)
            return None
        if name:
            self._claims.drop(name)
        for sequence in self._sequences.values():
            if sequence.num_blocks == 0 and sequence.credit > 0 and not sequence.copying:
                sequence.skipped += 1
        self._tickets[owner] = ticket
        self._blocks.share(Owner.ticket(owner), cached)
        self._blocks.allocate(Owner.ticket(owner), fresh)
        return list(self._blocks.blocks_of(Owner.ticket(owner)))

    def commit_ticket(self, owner: str, spec: RequestSpec, *first_tokens: int, exact: bool = True) -> None:
        """The ticket's blocks hold the KV of ``spec.known_tokens``: make sequences of them that go on from
        `first_tokens`, one for each of ``spec.samples``.

        They are reported by the next result. A sample that one of them ends frees its blocks at once. `exact`: the KV
        is what this model computes, and not what a lossy codec left of it; if it is not, none of it ever comes into
        the prefix cache.
        Raises TicketError if there is no such ticket or it was reserved for another request, InvalidRequest as `add`
        does; the ticket then is as before.
        """
        self.check_runnable(spec)
        samples = spec.samples
        if len(first_tokens) != len(samples):
            raise InvalidRequest("first_tokens", f"are {len(first_tokens)}, for {len(samples)} samples")
        for token in first_tokens:
            if not 0 <= token < self.model.vocab_size:
                raise InvalidRequest("first_tokens", f"{token} is not in [0, {self.model.vocab_size})")
        known = len(spec.known_tokens)
        with self.lock:
            self._check_new(spec)
            ticket, blocks = self._tickets.get(owner), self._blocks.blocks_of(Owner.ticket(owner))
            if ticket is None:
                raise TicketError(f"ticket {owner} is not open")
            if len(blocks) != self._blocks.blocks_for(known + 1) + len(samples) - 1:
                raise TicketError(f"ticket {owner} has {len(blocks)} blocks, not those of {known} tokens")
            if not ticket.is_for(spec):
                raise TicketError(f"ticket {owner} was reserved for other tokens")
            outputs = self._start_outputs(spec) if ticket.spec is None else ticket.outputs
            for output, token in zip(outputs, first_tokens, strict=True):
                if output is not None and not output.allows(token):
                    raise InvalidRequest("first_tokens", f"{token} does not fit the structured output")
            sequences = [self._new_sequence(sample, SequenceKind.GENERATE) for sample in samples]
            for sequence, output in zip(sequences, outputs, strict=True):
                sequence.outputs = (output,)
                sequence.hashes = list(ticket.hashes)
                sequence.replay_until = 0
                sequence.num_scored = sequence.num_prompt  # by whoever computed the prompt
                sequence.exact = exact
                self._enter(sequence)
            heir = sequences[0]
            self._blocks.transfer(Owner.ticket(owner), Owner.sequence(heir.key))
            del self._tickets[owner]
            heir.take_computed(blocks[: self._blocks.blocks_for(known + 1)], known, published=0)
            self._publish(heir)  # while its blocks are its own
            share_out(heir, sequences[1:], self._blocks, self._runner.cache, own=1)
            for sequence, token in zip(sequences, first_tokens, strict=True):
                self._echo(sequence, token)

    def _echo(self, sequence: Sequence, token: int) -> None:
        """A first token that came with a ticket: the next result reports it."""
        self._queue.generated(sequence.spec.tenant, 1)
        index = sequence.generated
        if sequence.output is not None:
            sequence.output.take_sampled(token)
        finish = sequence.append(token)
        self._echoes.append(TokenOut(sequence.key, index, token, finish))
        if finish is not None:
            self._leave(sequence)

    def release_ticket(self, owner: str) -> None:
        """Free the blocks of a ticket into which nothing is being written any more. Idempotent."""
        with self.lock:
            self._blocks.release(Owner.ticket(owner))
            self._tickets.pop(owner, None)

    # ---------------------------------------------------------------------------------------------------- sends

    def release_send(self, key: RequestKey) -> None:
        """The send session of a PREFILL sequence is over: free what the sequence left behind, or will. Idempotent."""
        with self.lock:
            sequence = self._sequences.get(key)
            if sequence is None:
                self._free(Owner.send(key), key)
            elif sequence.kind is SequenceKind.PREFILL:
                sequence.send_over = True

    def block_table(self, key: RequestKey) -> list[int] | None:
        """Blocks of a sequence, or of the send session that it left them to; None if there are none."""
        with self.lock:
            blocks = self._blocks.blocks_of(Owner.sequence(key)) or self._blocks.blocks_of(Owner.send(key))
            return list(blocks) or None

    # ------------------------------------------------------------------------------------------------- stepping

    def has_work(self) -> bool:
        """Whether there is news to report or a sequence with credit. `schedule` may still find that none can run
        before blocks come back; wait a bounded time for a change then."""
        with self.lock:
            return bool(self._echoes) or any(sequence.credit > 0 for sequence in self._sequences.values())

    def schedule(self) -> StepPlan | None:
        """Decide the next step and take its blocks. None if nothing can run and nothing is to be reported now.

        Every plan must be executed and applied before the next call.
        """
        with self.lock:
            assert self._in_flight is None, "the previous step has not been applied"
            started = self._clock.now()
            decision = decide(self._snapshot(), self._scheduler_config)
            self._wanted_blocks = 0
            plan = self._apply_decision(decision, started)
        for owner in decision.revoke:
            self._on_pressure(owner)
        if plan is None and decision.preempt:  # stalled or batch ones have made room for one that waits
            return self.schedule()
        return plan

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run the forward pass. Takes no lock."""
        if not plan.chunks:
            return StepOutput(np.empty(0, np.int64))
        return self._runner.run(plan.step_input)

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Book the step's results and free what was aborted meanwhile."""
        with self.lock:
            flight = self._land(plan)
            now = self._clock.now()
            assert len(output.token_ids) == len(flight.sampled), (len(output.token_ids), len(flight.sampled))
            sampled = dict(zip(flight.sampled, output.token_ids.tolist(), strict=True))
            scored = dict(of_spans(flight.scored, output.scores))
            logprob_rows = _logprob_rows(plan, flight)
            tokens, self._echoes = self._echoes, []
            rejected: list[tuple[RequestKey, PdserveError]] = []
            prefilled: list[PrefillStats] = []
            prompt_logprobs: list[PromptLogprobs] = []
            forked: list[RequestKey] = []
            for key, start, end, *_ in plan.chunks:
                sequence = self._sequences.get(key)
                if sequence is None:
                    continue  # aborted meanwhile
                samples = [(name, sampled[name]) for name in sequence.samples if name in sampled]
                if not sequence.spec.branches and samples and (problem := self._misfit(sequence, samples[0][1])):
                    rejected.append((key, problem))
                    continue
                preempt, again = sequence.recomputed(start, end)
                self._recomputed["preempt"] += preempt
                self._recomputed[sequence.lost_by] += again
                sequence.num_computed = end
                if any(token != NO_TOKEN and not 0 <= token < self.model.vocab_size for _, token in samples):
                    # The model has made nothing sensible of a trunk, whose samples end one by one.
                    self._blocks.unpublish(Owner.sequence(key))
                elif end // self._block_size > sequence.num_published:
                    self._publish(sequence)
                if key in scored:
                    sequence.num_scored = scored[key].end
                    prompt_logprobs.append(PromptLogprobs(key, scored[key]))
                if samples and sequence.generated == sequence.num_known - sequence.num_prompt:
                    prefilled.append(PrefillStats.of(sequence, now))
                if samples and sequence.spec.branches:
                    forked.append(key)
                    self._fork(sequence)
                for name, token in samples:
                    sampler = self._sequences.get(name)
                    if sampler is None:
                        continue  # a branch that was aborted before there was a trunk's end
                    if sequence.spec.branches and (problem := self._misfit(sampler, token)):
                        rejected.append((name, problem))
                        continue
                    logprobs = None
                    if name in logprob_rows:
                        assert output.logprobs is not None
                        top = sampler.spec.params.logprobs
                        logprobs = of_sample(output.logprobs, logprob_rows[name], sampler.generated, top or 0)
                    tokens.append(self._take_sampled(sampler, token, logprobs))
            seconds = now - flight.record.started
            if plan.chunks:
                self._log.end(flight.record, 1e3 * seconds)
            if plan.step_id > 1 and plan.step_input.num_decodes < len(plan.chunks):  # the first pays for lazy set-up
                self._swap.prefill_speed.add(len(plan.step_input.token_ids), seconds)
            return StepResult(
                plan.step_id,
                tuple(tokens),
                tuple(rejected),
                tuple(prefilled),
                tuple(prompt_logprobs),
                tuple(forked),
            )

    def _misfit(self, sequence: Sequence, token: int) -> PdserveError | None:
        """If there is nothing that could be its next token, end it and say why; else take the token into its
        structured output."""
        if not 0 <= token < self.model.vocab_size:
            return self._reject(sequence, token)
        problem = _off_structure(sequence, token)
        if problem is not None:
            sequence.abort()
            self._leave(sequence)
        return problem

    def _take_sampled(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> TokenOut:
        """It has its next token."""
        self._queue.generated(sequence.spec.tenant, 1)
        index = sequence.generated
        finish = sequence.append(token)
        if sequence.state is SequenceState.FINISHED:
            self._leave(sequence)
        return TokenOut(sequence.key, index, token, finish, logprobs)

    # ------------------------------------------------------------------------------------------------- samples

    def _fork(self, trunk: Sequence) -> None:
        """The prompt of several samples is computed: put them in the place of their trunk, those of them that are
        still wanted. Where the trunk's blocks stay with a send session the samples need none."""
        branches: list[Sequence] = []
        for spec, output in zip(trunk.spec.samples, trunk.outputs, strict=True):
            if spec.key not in trunk.unwanted:
                branch = self._new_sequence(spec, trunk.kind)
                branch.branch_off(trunk)
                branch.outputs = (output,)
                self._enter(branch)
                branches.append(branch)
        if branches and trunk.kind is SequenceKind.GENERATE:
            heir = branches[0]
            self._blocks.transfer(Owner.sequence(trunk.key), Owner.sequence(heir.key))
            heir.take_computed(trunk.block_ids, trunk.num_computed, trunk.num_published)
            share_out(heir, branches[1:], self._blocks, self._runner.cache)
        self._leave(trunk)

    def _abort_unborn(self, key: RequestKey) -> bool:
        """Abort a branch whose trunk is still being computed; False if there is none."""
        trunk = self._unborn.get(key)
        if trunk is not None:
            trunk.unwanted.add(key)
        return trunk is not None

    def fail(self, plan: StepPlan, error: PdserveError) -> StepResult:
        """The forward pass of `plan` has raised: its sequences end and are reported as rejected with `error`."""
        with self.lock:
            self._land(plan)
            rejected: list[tuple[RequestKey, PdserveError]] = []
            for chunk in plan.chunks:
                sequence = self._sequences.get(chunk.key)
                if sequence is None:
                    continue  # aborted meanwhile
                sequence.abort()
                self._leave(sequence)
                rejected.append((chunk.key, error))
            keys = {key for key, _ in rejected}
            echoes, self._echoes = [echo for echo in self._echoes if echo.key not in keys], []
            return StepResult(plan.step_id, tuple(echoes), tuple(rejected), ())

    def load(self) -> WorkerLoad:
        """Queue depths, blocks, counters and the mean step time, now."""
        with self.lock:
            with_credit = [sequence for sequence in self._sequences.values() if sequence.credit > 0]
            waiting = sum(
                sequence.state in (SequenceState.WAITING, SequenceState.SWAPPED) for sequence in with_credit
            )
            yielding = self._yielding()
            stalled = self._stalled.look(self._sequences, self._blocks, self._clock.now())
            return WorkerLoad(
                step=self._steps_done,
                waiting=waiting,
                running=len(with_credit) - waiting,
                paused=len(self._sequences) - len(with_credit),
                queued_prefill_tokens=queued_prefill_tokens(self._sequences, self._block_size),
                free_blocks=self._blocks.free,
                total_blocks=self._blocks.num_blocks,
                reserved_blocks=self._blocks.reserved,
                open_tickets=len(self._tickets),
                open_sends=len(self._blocks.owners(OwnerKind.SEND)),
                preemptions=self._preemptions,
                recomputed_tokens=dict(self._recomputed),
                step_ms=self._log.mean_ms,
                cached_blocks=self._blocks.cached,
                cached_tokens=self._cached_tokens,
                swapped=sum(sequence.state is SequenceState.SWAPPED for sequence in self._sequences.values()),
                swaps_out=self._swap.outs,
                swaps_in=self._swap.ins,
                swap_used_bytes=self._swap.used_bytes,
                step_time=self._log.step_time,
                yielding_requests=len(yielding),
                yielding_blocks=self._blocks.freed_by(Owner.sequence(sequence.key) for sequence in yielding),
                stalled_requests=stalled[0],
                stalled_blocks=stalled[1],
            )

    def last_steps(self, count: int) -> tuple[StepRecord, ...]:
        """Records of the last `count` steps at most, the oldest first."""
        with self.lock:
            return self._log.last(count)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End copies to and from host memory, and their thread; True if it has ended within `timeout_s`. The engine
        must not be used any more. Idempotent."""
        if self._guards is not None:
            self._guards.close()
        return self._swap.close(timeout_s)

    def cache_events(self, since: int) -> CacheEvents:
        """What came into the prefix cache and left it, from event `since` on."""
        with self.lock:
            return self._blocks.cache.events.since(since)

    def cached_names(self) -> tuple[list[bytes], int]:
        """Names of all blocks in the prefix cache, each behind that of the block before it, and the next event's
        number: what a follower of the events would know who missed none, and where to go on."""
        with self.lock:
            return self._blocks.cache.names(), self._blocks.cache.events.next

    def check_integrity(self) -> None:
        """Assert everything that holds between two calls of public methods."""
        with self.lock:
            flying = self._in_flight.keys if self._in_flight else frozenset()
            check_engine(
                self._sequences,
                self._tickets,
                self._blocks,
                self._swap,
                deferred=self._deferred,
                flying=flying,
                echoes=self._echoes,
            )

    # --------------------------------------------------------------------------------------------------- inside

    def _new_sequence(self, spec: RequestSpec, kind: SequenceKind) -> Sequence:
        root = self._root(spec) if self._prefix_cache else None
        return Sequence(spec, kind, block_size=self._block_size, now=self._clock.now(), root=root)

    def _start_outputs(self, spec: RequestSpec) -> tuple[OutputState | None, ...]:
        """Where the structured outputs of the request's samples stand after what was delivered; None where the output
        is free."""
        output = spec.params.structured_output
        if output is None:
            return (None,) * len(spec.samples)
        assert self._guards is not None, "checked before"
        return tuple(self._guards.start(output, spec.params, spec.delivered) for _ in spec.samples)

    def _root(self, spec: RequestSpec) -> bytes:
        return chain_root(self.geometry.model_digest, salt=spec.cache_salt)

    def _names(self, spec: RequestSpec) -> list[bytes]:
        """Names of the full blocks of what the request knows; none if there is no prefix cache."""
        return block_hashes(self._root(spec), spec.known_tokens, self._block_size) if self._prefix_cache else []

    def _check_new(self, spec: RequestSpec) -> None:
        for key in (spec.key, *spec.branch_keys):
            owners = (Owner.sequence(key), Owner.send(key), Owner.swap(key))
            if key in self._sequences or key in self._unborn or any(map(self._blocks.blocks_of, owners)):
                raise InvalidRequest("request_id", f"attempt {key.attempt} of {key.request_id} is already here")

    def _apply_decision(self, decision: ScheduleDecision, now: float) -> StepPlan | None:
        # Before anything is freed: whether a front is left behind depends on who uses it.
        for key in decision.swap_out:
            if not self._swap.swap_out(self._sequences[key]):
                self._drop(key)
        for key in decision.preempt:
            self._drop(key)
        self._preemptions += len(decision.swap_out) + len(decision.preempt)
        self._log.decided(decision)
        for name in decision.revoke:
            self._tickets[name].revoking = True
        for passed in decision.passed_over:
            self._sequences[passed.key].skipped += passed.times
        # All of it before anything is allocated: what the decision counts on must not be evicted by its own steps.
        for key in decision.admitted:
            self._take_cached(self._sequences[key])
        for key in decision.swap_in:
            self._share_cached(self._sequences[key], Owner.swap(key))
        for key in decision.swap_in:
            self._swap.swap_in(self._sequences[key])
        if not decision.chunks and not self._echoes:
            return None

        record = self._record(decision, now)
        self._step_id += 1
        chunks: list[Chunk] = []
        parts: list[Part] = []
        for key, start, num_tokens, new_blocks in decision.chunks:
            sequence = self._sequences[key]
            assert start == sequence.num_computed, (key, start, sequence.num_computed)
            if new_blocks:
                sequence.take_blocks(self._blocks.allocate(Owner.sequence(key), new_blocks))
            end, block_ids = start + num_tokens, sequence.block_ids
            written = block_ids[start // self._block_size : -(-end // self._block_size)]
            assert all(map(self._blocks.is_private, written)), f"{key}: a block that others use is written"
            sequence.start(now, self._step_id)
            chunks.append(Chunk(key, start, end, start < sequence.num_known, block_ids))
            parts.append(Part(sequence, num_tokens))
        self._book_admissions(decision.admitted)
        make_masks = None if self._guards is None else self._guards.masks
        step_input = build_step(self._step_id, parts, self._block_size, make_masks)
        plan = StepPlan(self._step_id, step_input, tuple(chunks))
        sampled = tuple(name for part in parts if part.samples for name in part.sequence.samples)
        scored = tuple(span for part in parts if (span := part.scored) is not None)
        self._in_flight = _InFlight(plan, sampled, scored, frozenset(chunk.key for chunk in chunks), record)
        return plan

    def _record(self, decision: ScheduleDecision, now: float) -> StepRecord:
        waiting = [s.spec.priority for s in self._sequences.values() if s.num_blocks == 0]
        return self._log.begin(
            self._step_id + 1,
            now,
            decision,
            free_blocks=self._blocks.free,
            running=len(self._sequences) - len(waiting),
            waiting=by_class(waiting),
        )

    def _book_admissions(self, admitted: tuple[RequestKey, ...]) -> None:
        """Tell the queue who has left it; their blocks are theirs, and they are counted in the step."""
        if not admitted:
            return
        stay = [s.spec.priority for s in self._sequences.values() if s.num_blocks == 0]
        for key in admitted:
            sequence = self._sequences[key]
            spec, again = sequence.spec, sequence.chunks > 1 or sequence.preempted
            entry = Waiting(sequence.arrival, sequence.remaining, spec.tenant, spec.priority, again)
            self._queue.started(entry, stay)

    def _enter(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._sequences[sequence.key] = sequence
        self._unborn.update(dict.fromkeys(sequence.spec.branch_keys, sequence))

    def _yielding(self) -> list[Sequence]:
        """Running batch sequences that would give way to interactive requests."""
        config = self._scheduler_config
        if config.queue.policy != "priority":
            return []
        batch = [s for s in self._sequences.values() if s.num_blocks and s.spec.priority is PriorityClass.BATCH]
        return [sequence for sequence in batch[kept_batch(config) :] if may_yield(sequence)]

    def _land(self, plan: StepPlan) -> _InFlight:
        """The forward pass of `plan` has ended: nothing writes its blocks any more."""
        flight = self._in_flight
        assert flight is not None, "no step is in flight"
        assert flight.plan is plan, (flight.plan.step_id, plan.step_id)
        self._in_flight = None
        self._steps_done += 1
        for owner in self._deferred:
            self._blocks.release(owner)
        self._deferred.clear()
        return flight

    def _take_cached(self, sequence: Sequence) -> None:
        """Give a sequence that is being admitted what the prefix cache has of it."""
        if sequence.state is SequenceState.SWAPPED:  # and its copy in host memory is of no use
            self._swap.drop(sequence.key)
            sequence.preempt()
        blocks = self._share_cached(sequence, Owner.sequence(sequence.key))
        first_time = sequence.chunks == 0
        sequence.take_cached(blocks)
        if first_time:
            self._cached_tokens += sequence.cached_tokens

    def _share_cached(self, sequence: Sequence, owner: Owner) -> list[int]:
        blocks = self._blocks.cache.blocks(sequence.hashes, sequence.hits)
        self._blocks.share(owner, blocks)
        return blocks

    def _drop(self, key: RequestKey) -> None:
        """Preempt a sequence: what the prefix cache does not keep of its KV is lost."""
        self._sequences[key].preempt()
        self._blocks.release(Owner.sequence(key))

    def _copied(self, copy: Copy) -> None:
        """A copy to or from host memory has ended."""
        with self.lock:
            sequence = self._sequences.get(copy.key)
            if self._swap.finish(copy, sequence):
                assert sequence is not None
                self._publish(sequence)
        self._on_copied()

    def _snapshot(self) -> SchedulerSnapshot:
        now = self._clock.now()
        return take_snapshot(
            self._sequences,
            self._tickets,
            self._blocks,
            book=self._queue,
            step_time=self._log.step_time,
            max_num_seqs=self._scheduler_config.max_num_seqs,
            now=now,
            terms=self._swap.terms(),
            swap_room=self._swap.room,
            wanted_blocks=self._wanted_blocks,
            claims=self._claims.views(now, self._used),
        )

    def _used(self, names: Seq[bytes]) -> list[int]:
        """Blocks of these names, from the front, as far as the prefix cache has them, that somebody uses."""
        cache = self._blocks.cache
        return self._blocks.used(cache.blocks(names, cache.match(names, len(names), len(names))))

    def _publish(self, sequence: Sequence) -> None:
        """Put the blocks that have become full since the last time into the prefix cache, if they are fit for it."""
        full = sequence.may_publish
        if full == 0:
            return
        owner = Owner.sequence(sequence.key)
        self._blocks.publish(owner, sequence.name_blocks(full), full, guess=sequence.num_published)
        sequence.num_published = full

    def _reject(self, sequence: Sequence, token: int) -> PdserveError:
        """End a sequence for which there is no next token, and say why."""
        error: PdserveError
        if token == NO_TOKEN:
            error = InvalidRequest("sampling", f"excludes every token at position {sequence.num_tokens}")
        else:
            # The model has made nothing sensible of the sequence: nobody else shall start from its KV.
            self._blocks.unpublish(Owner.sequence(sequence.key))
            error = InternalError(f"request {sequence.key.request_id}: the model yielded no token")
        sequence.abort()
        self._leave(sequence)
        return error

    def _leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, and free its blocks or leave them to its send session."""
        del self._sequences[sequence.key]
        for branch in sequence.spec.branch_keys:
            del self._unborn[branch]
        owner = Owner.sequence(sequence.key)
        if sequence.kind is SequenceKind.PREFILL and not sequence.send_over:
            self._blocks.transfer(owner, Owner.send(sequence.key))
            return
        self._swap.drop(sequence.key)
        self._free(owner, sequence.key)

    def _free(self, owner: Owner, key: RequestKey) -> None:
        """Free an owner's blocks, but not under a forward pass that writes them."""
        if self._in_flight is None or key not in self._in_flight.keys:
            self._blocks.release(owner)
        elif self._blocks.blocks_of(owner) and owner not in self._deferred:
            self._deferred.append(owner)


def _off_structure(sequence: Sequence, token: int) -> InvalidRequest | None:
    """Take a sampled token into the sequence's structured output; why it cannot be, if that is so."""
    output = sequence.output
    return None if output is None or output.take_sampled(token) else output.failure
