"""A request whose attempt was lost or refused goes back into the queue: when it may start again, and where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdcore.clock import Clock
from router.active import ActiveRequest, Counters, log_event
from router.admission import AdmissionQueue
from router.effects import Effect, Requeue
from router.rebuild import FailedTransfer, TransferRates, after_failed_transfer, another_pair
from router.retry import REFUSED, REPLAYED, RetryBudget
from router.tracker import FailureKind, RequestState
from router.worker_pool import WorkerPool

MAX_PREFILL_TRIES = 3
"""Prefill workers that a request asks before the decode side computes its prompt."""


class Replays:
    """Carries out `router.effects.Requeue`. Everything happens on one event loop.

    Args:
        budget: of all requests together.
        perform: carries out what a request's tracker decided. run_soon: looks at the queue.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        pool: WorkerPool,
        rates: TransferRates,
        counters: Counters,
        clock: Clock,
        *,
        budget: RetryBudget,
        perform: Callable[[ActiveRequest, Sequence[Effect]], None],
        run_soon: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._rates = rates
        self._counters = counters
        self._budget = budget
        self._clock = clock
        self._perform = perform
        self._run_soon = run_soon

    def requeue(self, active: ActiveRequest, effect: Requeue) -> None:
        now = self._clock.now()
        if active.branches and not self._regroup(active, effect, now):
            return
        active.trunk = None
        not_before = now
        if effect.counted:
            self._counters.replays += 1
            active.avoid = effect.pair or frozenset({effect.worker_id})
            active.rebuild = False  # that was for the transfer that failed before; this may be a dead worker
            if effect.pair:
                self._transfer_failed(active, effect.pair)
            not_before = self._replay_at(active, now)
        else:
            active.refusals += 1
            delay = REFUSED.delay_s(active.refusals, active.tracker.request_id, active.left_s)
            if not active.local_only:
                active.refused[effect.worker_id] = now + delay
            elif active.refusals > 1:
                not_before += delay
        if effect.worker_id == active.tracker.prefill_worker and not effect.pair:
            self._unfit(active, effect.worker_id)
        log_event(
            logging.WARNING if effect.counted else logging.DEBUG,
            "request is run again" if effect.counted else "request was refused",
            active,
            worker=effect.worker_id,
            attempt=active.tracker.attempt,
            delivered=len(active.tracker.delivered),
            wait_s=round(not_before - now, 3),
            because=effect.reason,
        )
        self._queue.put_back(active.entry, not_before)
        self._run_soon()

    def _replay_at(self, active: ActiveRequest, now: float) -> float:
        """When its next replay may start. The first one need not wait; if that fails too, haste does not help."""
        replays, delay = active.tracker.timeline.replays, 0.0
        if replays > 1:
            delay = REPLAYED.delay_s(replays - 1, active.tracker.request_id, active.left_s)
        active.turn = self._budget.turn(now)
        return max(active.turn, now + delay)

    def _unfit(self, active: ActiveRequest, worker_id: str) -> None:
        """A prefill worker failed or refused: another one computes the prompt, or, if there is none or some of them
        have had their turn, the decode side. So a pool that is overloaded keeps nobody waiting."""
        active.unfit |= {worker_id}
        if len(active.unfit) >= MAX_PREFILL_TRIES:
            fleet = self._pool.fleet()
            active.unfit |= {fleet.id_of(number) for number in fleet.prefill.nonzero()[0].tolist()}

    def ended(self, active: ActiveRequest) -> None:
        """Whatever became of it."""
        now = self._clock.now()
        if active.turn > now:
            self._budget.given_back(now)

    def _regroup(self, trunk: ActiveRequest, effect: Requeue, now: float) -> bool:
        """A trunk's attempt is lost. Its samples without a token wait for the next one; those that have one, from the
        prefill worker, go on alone. False if there is none left to wait."""
        kind = FailureKind.BROKEN if effect.counted else FailureKind.BUSY
        if effect.pair:
            kind = FailureKind.TRANSFER
        waiting = False
        for sample in trunk.branches:
            tracker = sample.tracker
            if sample.trunk is None or tracker.state is RequestState.ENDED:
                continue
            if tracker.delivered:
                self._perform(sample, tracker.failed(effect.worker_id, tracker.attempt, kind, effect.reason, now))
            else:
                self._perform(sample, tracker.part())
                waiting = True
        if not waiting:
            self._perform(trunk, trunk.tracker.dissolve(now))
        return waiting

    def _transfer_failed(self, active: ActiveRequest, pair: frozenset[str]) -> None:
        """Another pair, or no transfer at all."""
        tracker = active.tracker
        active.failed_transfers += 1
        tokens = tracker.prompt_tokens
        decision = after_failed_transfer(
            FailedTransfer(
                failures=active.failed_transfers,
                delivered=len(tracker.delivered),
                tokens=tokens,
                elsewhere=another_pair(pair, self._pool.fleet()),
                again=self._rates.again(tokens),
                prefill_tokens_s=self._rates.decode_side_tokens_s,
            )
        )
        if decision.rebuild:
            active.rebuild = True
            self._counters.rebuilds += 1
            # The decode worker is as good as any: what failed is the way to it.
            active.avoid = frozenset()
        mode = "rebuild" if decision.rebuild else "elsewhere"
        log_event(logging.INFO, "transfer has failed", active, next=mode, because=decision.reason)
