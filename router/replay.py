"""A request whose attempt was lost or refused goes back into the queue: when it may start again, and where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdcore.clock import Clock
from router.active import ActiveRequest, Counters, log_event
from router.admission import AdmissionQueue
from router.effects import Effect, Requeue
from router.rebuild import FailedTransfer, TransferRates, after_failed_transfer, another_pair
from router.tracker import FailureKind, RequestState
from router.worker_pool import WorkerPool

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5


class Replays:
    """Carries out `router.effects.Requeue`. Everything happens on one event loop.

    Args:
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
        perform: Callable[[ActiveRequest, Sequence[Effect]], None],
        run_soon: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._rates = rates
        self._counters = counters
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
            # The first replay starts at once; if that fails too, haste does not help.
            replays = active.tracker.timeline.replays
            not_before += 0.0 if replays == 1 else _backoff(replays)
        elif not active.local_only:
            active.refusals += 1
            active.refused[effect.worker_id] = now + _backoff(active.refusals)
        else:
            active.refusals += 1
            not_before += 0.0 if active.refusals == 1 else _backoff(active.refusals)
        log_event(
            logging.WARNING if effect.counted else logging.DEBUG,
            "request is run again" if effect.counted else "request was refused",
            active,
            worker=effect.worker_id,
            attempt=active.tracker.attempt,
            delivered=len(active.tracker.delivered),
            because=effect.reason,
        )
        self._queue.put_back(active.entry, not_before)
        self._run_soon()

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
                elsewhere=another_pair(pair, self._pool.snapshots()),
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


def _backoff(times: int) -> float:
    return float(min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(times - 1, 10)))
