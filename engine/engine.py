"""The engine: sequences, block ownership and the step, behind one lock. It knows no transport and no router."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.batch import Part, build_step
from engine.blocks import BlockManager, Owner, OwnerKind
from engine.plan import Chunk, PrefillStats, StepPlan, StepResult, TokenOut
from engine.scheduler import ScheduleDecision, SchedulerSnapshot, SequenceView, TicketView, ticket_refusal
from engine.scheduler import schedule as decide
from engine.sequence import Sequence, SequenceKind, SequenceState
from engine.step import ModelRunner, StepOutput, StepProgress
from engine.validation import check_request
from pdcore.clock import Clock, MonotonicClock
from pdcore.config import EngineConfig
from pdcore.errors import InternalError, InvalidRequest, PdserveError, TicketError
from pdcore.types import KvGeometry, ModelInfo, RequestKey, RequestSpec, WorkerLoad

__all__ = ["Chunk", "Engine", "PrefillStats", "SequenceKind", "StepPlan", "StepResult", "TokenOut"]

STEP_TIMES = 32
"""Steps over which `WorkerLoad.step_ms` is the mean."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The step between `schedule` and `apply`: its sequences' blocks may be written at any moment."""

    plan: StepPlan
    sampled: tuple[RequestKey, ...]  # in the order of the runner's output
    keys: frozenset[RequestKey]
    started: float


def _no_pressure(owner: str) -> None:
    """For engines whose tickets are never revoked: they go by commit, release or lease."""


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
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Clock | None = None,
        on_pressure: Callable[[str], None] = _no_pressure,
        max_reserved_fraction: float = 0.5,
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
        self._max_reserved = int(max_reserved_fraction * runner.geometry.num_blocks)
        self._blocks = BlockManager(runner.geometry.num_blocks, runner.geometry.block_size)
        self._sequences: dict[RequestKey, Sequence] = {}  # oldest first
        self._revoking: set[str] = set()  # tickets whose revocation has been asked for
        self._deferred: list[Owner] = []  # freed when the step in flight is applied
        self._echoes: list[TokenOut] = []  # first tokens of commits, reported by the next result
        self._in_flight: _InFlight | None = None
        self._step_id = 0
        self._steps_done = 0
        self._step_times: deque[float] = deque(maxlen=STEP_TIMES)
        self._preemptions = 0
        self._recomputed = {"preempt": 0, "replay": 0}

    # ------------------------------------------------------------------------------------------------- requests

    def check_runnable(self, spec: RequestSpec, kind: SequenceKind = SequenceKind.GENERATE) -> None:
        """Raise InvalidRequest, naming the field, if the request can never run here."""
        check_request(spec, kind, self.model.vocab_size, self.max_model_len, self._blocks)

    def add(self, spec: RequestSpec, kind: SequenceKind) -> None:
        """Queue a request. Raises InvalidRequest if it can never run here, or if its key is in use."""
        self.check_runnable(spec, kind)
        with self.lock:
            self._check_new(spec.key)
            self._sequences[spec.key] = self._new_sequence(spec, kind)

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
                return len(self._echoes) < news
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

    def reserve_ticket(self, owner: str, num_tokens: int) -> list[int] | None:
        """Take blocks for `num_tokens` tokens that will come from elsewhere, and for the first one computed here.

        Returns the block ids, or None if the ticket is refused now. Raises TicketError if `owner` has one already.
        """
        assert num_tokens >= 1, num_tokens
        ticket = Owner.ticket(owner)
        count = self._blocks.blocks_for(num_tokens + 1)
        with self.lock:
            if self._blocks.blocks_of(ticket):
                raise TicketError(f"ticket {owner} is already open")
            if ticket_refusal(self._snapshot(), count, self._max_reserved) is not None:
                return None
            for sequence in self._sequences.values():
                if sequence.num_blocks == 0 and sequence.credit > 0:
                    sequence.skipped += 1
            return list(self._blocks.allocate(ticket, count))

    def commit_ticket(self, owner: str, spec: RequestSpec, first_token: int) -> None:
        """The ticket's blocks hold the KV of ``spec.known_tokens``: make a sequence of them that goes on from
        `first_token`.

        `first_token` is reported by the next result. If it ends the request, the blocks are freed at once.
        Raises TicketError if there is no such ticket or it was reserved for another number of tokens, InvalidRequest
        as `add` does; the ticket then is as before.
        """
        self.check_runnable(spec)
        if not 0 <= first_token < self.model.vocab_size:
            raise InvalidRequest("first_token", f"{first_token} is not in [0, {self.model.vocab_size})")
        ticket, known = Owner.ticket(owner), len(spec.known_tokens)
        with self.lock:
            self._check_new(spec.key)
            blocks = self._blocks.blocks_of(ticket)
            if not blocks:
                raise TicketError(f"ticket {owner} is not open")
            if len(blocks) != self._blocks.blocks_for(known + 1):
                raise TicketError(f"ticket {owner} has {len(blocks)} blocks, not those of {known} tokens")
            sequence = self._new_sequence(spec, SequenceKind.GENERATE)
            sequence.replay_until = 0
            sequence.num_computed = known
            sequence.take_blocks(blocks)
            self._blocks.transfer(ticket, Owner.sequence(spec.key))
            self._revoking.discard(owner)
            self._sequences[spec.key] = sequence
            index = sequence.generated
            finish = sequence.append(first_token)
            self._echoes.append(TokenOut(spec.key, 0, index, first_token, finish))
            if finish is not None:
                self._leave(sequence)

    def release_ticket(self, owner: str) -> None:
        """Free the blocks of a ticket into which nothing is being written any more. Idempotent."""
        with self.lock:
            self._blocks.release(Owner.ticket(owner))
            self._revoking.discard(owner)

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
            plan = self._apply_decision(decision, started)
        for owner in decision.revoke:
            self._on_pressure(owner)
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
            for chunk in plan.chunks:
                sequence = self._sequences.get(chunk.key)
                if sequence is None:
                    continue  # aborted meanwhile
                preempt, replay = sequence.recomputed(chunk.token_start, chunk.token_end)
                self._recomputed["preempt"] += preempt
                self._recomputed["replay"] += replay
                sequence.num_computed = chunk.token_end
            tokens, self._echoes = self._echoes, []
            rejected: list[tuple[RequestKey, PdserveError]] = []
            prefilled: list[PrefillStats] = []
            for key, token in zip(flight.sampled, output.token_ids.tolist(), strict=True):
                sequence = self._sequences.get(key)
                if sequence is None:
                    continue
                if not 0 <= token < self.model.vocab_size:
                    sequence.abort()
                    self._leave(sequence)
                    rejected.append((key, InternalError(f"request {key.request_id}: the model yielded no token")))
                    continue
                index = sequence.generated
                finish = sequence.append(token)
                tokens.append(TokenOut(key, 0, index, token, finish))
                if sequence.state is SequenceState.FINISHED:
                    self._leave(sequence)
                if sequence.kind is SequenceKind.PREFILL:
                    queued_s, compute_s = sequence.started_at - sequence.queued_at, now - sequence.started_at
                    prefilled.append(PrefillStats(key, queued_s, compute_s, sequence.chunks))
            if plan.chunks:
                self._step_times.append(now - flight.started)
            return StepResult(plan.step_id, tuple(tokens), tuple(rejected), tuple(prefilled))

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
            waiting = sum(sequence.state is SequenceState.WAITING for sequence in with_credit)
            return WorkerLoad(
                step=self._steps_done,
                waiting=waiting,
                running=len(with_credit) - waiting,
                paused=len(self._sequences) - len(with_credit),
                queued_prefill_tokens=sum(s.remaining for s in self._sequences.values() if s.is_prefilling),
                free_blocks=self._blocks.free,
                total_blocks=self._blocks.num_blocks,
                reserved_blocks=self._blocks.reserved,
                open_tickets=len(self._blocks.owners(OwnerKind.TICKET)),
                open_sends=len(self._blocks.owners(OwnerKind.SEND)),
                preemptions=self._preemptions,
                recomputed_tokens=dict(self._recomputed),
                step_ms=1e3 * sum(self._step_times) / len(self._step_times) if self._step_times else 0.0,
            )

    def check_integrity(self) -> None:
        """Assert everything that holds between two calls of public methods."""
        with self.lock:
            self._blocks.check_integrity()
            for key, sequence in self._sequences.items():
                where = f"{key} {sequence.state}"
                owned = self._blocks.blocks_of(Owner.sequence(key))
                assert sequence.block_ids == tuple(owned), f"{where}: block table differs from the blocks owned"
                assert 0 <= sequence.num_computed < sequence.num_tokens, where
                assert sequence.num_computed <= len(owned) * self.geometry.block_size, where
                assert len(owned) <= sequence.max_blocks, where
                assert 0 <= sequence.credit <= sequence.spec.token_window, where
                assert sequence.state in (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PAUSED), where
                assert (sequence.state is SequenceState.PAUSED) == (sequence.credit == 0 and bool(owned)), where
                assert owned or sequence.state is SequenceState.WAITING, where
                assert not self._blocks.blocks_of(Owner.send(key)), where
            flying = self._in_flight.keys if self._in_flight else frozenset()
            assert len(set(self._deferred)) == len(self._deferred), self._deferred
            for owner in self._deferred:
                assert owner.id in flying, f"{owner} is deferred without a step that writes it"
                assert owner.id not in self._sequences, owner
                assert self._blocks.blocks_of(owner), f"{owner} is deferred and owns nothing"
            for owner in self._blocks.owners(OwnerKind.SEQUENCE):
                assert owner.id in self._sequences or owner in self._deferred, f"{owner} is unknown"
            for name in self._revoking:
                assert self._blocks.blocks_of(Owner.ticket(name)), f"ticket {name} is revoked and gone"
            for echo in self._echoes:
                assert echo.key in self._sequences or echo.finish is not None, echo

    # --------------------------------------------------------------------------------------------------- inside

    def _new_sequence(self, spec: RequestSpec, kind: SequenceKind) -> Sequence:
        return Sequence(spec, kind, block_size=self.geometry.block_size, now=self._clock.now())

    def _check_new(self, key: RequestKey) -> None:
        held = self._blocks.blocks_of(Owner.sequence(key)) or self._blocks.blocks_of(Owner.send(key))
        if key in self._sequences or held:
            raise InvalidRequest("request_id", f"attempt {key.attempt} of {key.request_id} is already here")

    def _snapshot(self) -> SchedulerSnapshot:
        blocks_for = self._blocks.blocks_for
        return SchedulerSnapshot(
            sequences=tuple(
                SequenceView(
                    sequence.key,
                    sequence.num_tokens,
                    sequence.num_computed,
                    sequence.num_blocks,
                    min(blocks_for(sequence.num_tokens + 1), sequence.max_blocks),
                    sequence.max_blocks,
                    sequence.credit > 0,
                    sequence.kind is SequenceKind.GENERATE,
                    sequence.skipped,
                    sequence.last_step,
                )
                for sequence in self._sequences.values()
            ),
            tickets=tuple(
                TicketView(str(owner.id), len(self._blocks.blocks_of(owner)), owner.id in self._revoking)
                for owner in self._blocks.owners(OwnerKind.TICKET)
            ),
            free_blocks=self._blocks.free,
            block_size=self.geometry.block_size,
        )

    def _apply_decision(self, decision: ScheduleDecision, now: float) -> StepPlan | None:
        for key in decision.preempt:
            self._sequences[key].preempt()
            self._blocks.release(Owner.sequence(key))
            self._preemptions += 1
        self._revoking.update(decision.revoke)
        for passed in decision.passed_over:
            self._sequences[passed.key].skipped += passed.times
        if not decision.chunks and not self._echoes:
            return None

        self._step_id += 1
        chunks: list[Chunk] = []
        parts: list[Part] = []
        for key, start, num_tokens, new_blocks in decision.chunks:
            sequence = self._sequences[key]
            if new_blocks:
                sequence.take_blocks(self._blocks.allocate(Owner.sequence(key), new_blocks))
            sequence.start(now, self._step_id)
            chunks.append(Chunk(key, start, start + num_tokens, start < sequence.num_known, sequence.block_ids))
            parts.append(Part(sequence, num_tokens))
        step_input = build_step(self._step_id, parts, self.geometry.block_size)
        plan = StepPlan(self._step_id, step_input, tuple(chunks))
        sampled = tuple(part.sequence.key for part in parts if part.samples)
        self._in_flight = _InFlight(plan, sampled, frozenset(chunk.key for chunk in chunks), now)
        return plan

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

    def _leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, and free its blocks or leave them to its send session."""
        del self._sequences[sequence.key]
        owner = Owner.sequence(sequence.key)
        if sequence.kind is SequenceKind.PREFILL and not sequence.send_over:
            self._blocks.transfer(owner, Owner.send(sequence.key))
            return
        self._free(owner, sequence.key)

    def _free(self, owner: Owner, key: RequestKey) -> None:
        """Free an owner's blocks, but not under a forward pass that writes them."""
        if self._in_flight is None or key not in self._in_flight.keys:
            self._blocks.release(owner)
        elif self._blocks.blocks_of(owner) and owner not in self._deferred:
            self._deferred.append(owner)
