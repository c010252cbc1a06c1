"""Who gets in: tenants' limits, the queue's bounds, and the forecast of when a first token would come.

Carries out what `router.limits`, `router.admission`, `router.shedding` and `router.gaps` decide, and counts it.
Everything happens on one event loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdcore.clock import Clock
from pdcore.config import RouterConfig
from pdcore.errors import Overloaded, RateLimited
from pdcore.types import PriorityClass
from router import effects as effects_of
from router.active import ActiveRequest
from router.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, AdmissionQueue, QueueEntry, Shed
from router.capacity import Capacity, capacity_of
from router.gaps import HeldBack, closed_to_batch
from router.limits import Charge, TenantBook
from router.shedding import ARRIVING, WAITING, Ahead, Asked, Overdue, Pace, forecast, on_worker, verdict
from router.validation import GenerationRequest
from router.worker_pool import WorkerPool

REVIEW_S = 0.05
"""Those that wait are looked at again no sooner: what is expected changes with the workers' reports."""
CAPACITY_S = 0.02
"""So long one look at the workers serves, unless something is sent to them meanwhile."""


@dataclass(slots=True)
class ClassCounters:
    """Requests of one class, since the start.

    Attributes:
        admitted: that were let in. shed_full: refused since enough waited. shed_late: refused since their deadline or
            objective could not be met; shed_waiting: given up for that while they waited.
        finished: that ended well; of these late: with a first token later than the objective, slow: with a mean time
            between tokens longer than the objective.
    """

    admitted: int = 0
    shed_full: int = 0
    shed_late: int = 0
    shed_waiting: int = 0
    finished: int = 0
    late: int = 0
    slow: int = 0


class AdmissionControl:
    """Between a request and the queue.

    ::

        knock --> admit --> held_back, started --> first_token --> ended
                      '---- overdue ---------------------------------^

    Args:
        queue: where admitted requests wait. active: those that have not ended, by id.
    """

    def __init__(
        self,
        config: RouterConfig,
        queue: AdmissionQueue,
        pool: WorkerPool,
        active: Mapping[str, ActiveRequest],
        clock: Clock,
    ) -> None:
        self.tenants = TenantBook(config.tenants)
        self.rate_limited = 0
        self.counters = {priority: ClassCounters() for priority in PriorityClass}
        self._config = config
        self._classes = config.classes
        self._queue = queue
        self._pool = pool
        self._active = active
        self._clock = clock
        self._open: Counter[PriorityClass] = Counter()
        self._pace = Pace()
        self._capacity: Capacity | None = None
        self._looked = self._reviewed = -math.inf

    def default_class(self, tenant: str) -> PriorityClass:
        """Of the tenant's requests that name none."""
        return self.tenants.default_class(tenant)

    def knock(self, tenant: str) -> None:
        """Refuse what would be refused however short it is, before anything is done for it. Raises RateLimited."""
        self._check_limits(tenant, 0)

    def admit(self, request: GenerationRequest, lacking: int, deadline: float | None) -> tuple[QueueEntry, Charge]:
        """Let a request into the queue, at its tenant's charge.

        Args:
            lacking: its prompt tokens that no worker has cached. deadline: on the clock, in seconds.

        Raises:
            RateLimited: its tenant's limits are used up. Overloaded: its class's queue is full, or it cannot be
                served in time.
        """
        now, priority = self._clock.now(), request.priority
        tokens = len(request.prompt) + request.samples * request.params.max_tokens
        self._check_limits(request.tenant, tokens)
        counters = self.counters[priority]
        asked = Asked(
            prompt_tokens=len(request.prompt),
            lacking=lacking,
            objective_ms=self._classes.of(priority).ttft_ms,
            deadline_ms=math.inf if deadline is None else 1000 * (deadline - now),
        )
        overdue = self._too_late(asked, lambda: self._ahead_of(request, lacking), now)
        if overdue is not None:
            counters.shed_late += 1
            raise _shed(overdue, ARRIVING)
        admitted = self._queue.offer(
            request.request_id,
            priority,
            tokens=lacking,
            tenant=request.tenant,
            now=now,
            deadline=math.inf if deadline is None else deadline,
        )
        if isinstance(admitted, Shed):
            counters.shed_full += 1
            waiting = f"{self._queue.waiting_of(priority)} {priority.name.lower()} requests are waiting already"
            raise Overloaded(waiting, admitted.retry_after_s).with_facts(
                priority=priority.name.lower(), max_queue=self._config.max_queue_by_class[priority]
            )
        counters.admitted += 1
        self._open[priority] += 1
        return admitted.entry, self.tenants.admit(request.tenant, tokens, now)

    def overdue(self) -> list[tuple[ActiveRequest, Overloaded]]:
        """Waiting requests to give up now, and what to tell their clients. One that was computed before goes on."""
        now = self._clock.now()
        if now < self._reviewed + REVIEW_S or not len(self._queue):
            return []
        self._reviewed = now
        capacity = self._capacity_now(now)
        if capacity is None:
            return []
        found: list[tuple[ActiveRequest, Overloaded]] = []
        gone = Ahead()  # nobody waits for those that are given up here
        for entry, ahead in self._queue.ahead_of_waiting():
            active = self._active[entry.request_id]
            if active.tracker.delivered or active.tracker.timeline.replays:
                continue
            asked = Asked(
                prompt_tokens=active.tracker.prompt_tokens,
                lacking=entry.tokens,
                objective_ms=self._classes.of(entry.priority).ttft_ms,
                deadline_ms=1000 * (entry.deadline - now),
                waited_ms=1000 * (now - entry.came),
            )
            left = Ahead(ahead.tokens - gone.tokens, ahead.requests - gone.requests)
            overdue = _judged(asked, left, capacity)
            if overdue is not None:
                gone = Ahead(gone.tokens + entry.tokens, gone.requests + 1)
                found.append((active, _shed(overdue, WAITING)))
                self.counters[entry.priority].shed_waiting += 1
        return found

    def held_back(self, active: ActiveRequest) -> HeldBack:
        """Whether and where a request is not to be started now: a batch request, in favour of others."""
        entry = active.entry
        if entry.priority is not PriorityClass.BATCH or active.tracker.delivered:
            return HeldBack()
        if self._config.queue.policy != "priority" or self._queue.batch_due:
            return HeldBack()
        fleet = self._pool.fleet()
        closed = closed_to_batch(fleet, active.tracker.prompt_tokens, self._classes)
        if not closed.any():
            return HeldBack()
        return HeldBack(closed, waits=not (fleet.generating & ~closed).any())

    @property
    def itl_ms(self) -> float:
        """The shortest time between two tokens that is aimed at, of the classes that have requests here; 0: none."""
        objectives = (self._classes.of(priority).itl_ms for priority, count in self._open.items() if count)
        return min((itl_ms for itl_ms in objectives if itl_ms), default=0.0)

    def started(self, active: ActiveRequest, worker_id: str, lacking: int) -> None:
        """A request is about to be given to the worker that computes its prompt; nothing of it has been yet."""
        active.expected_token = None
        self._looked = -math.inf
        fleet = self._pool.fleet()
        number = fleet.number_of.get(worker_id)
        if number is None or active.branches or active.tracker.delivered:
            return
        expected_ms = on_worker(fleet, number, active.tracker.prompt_tokens, lacking)
        if expected_ms is not None:
            active.expected_token = (self._clock.now(), expected_ms)

    def first_token(self, active: ActiveRequest) -> None:
        """Its first token has come."""
        if active.expected_token is not None:
            started, expected_ms = active.expected_token
            self._pace.observe(expected_ms, 1000 * (self._clock.now() - started))
            active.expected_token = None

    def ended(self, active: ActiveRequest, outcome: effects_of.Outcome) -> None:
        """The terminal event of a request, or of one of its samples: with the last one it gives its place back."""
        if outcome.error is None:
            self._count(active)
        if active.group is not None and active.group.running:
            return
        self._open[active.entry.priority] -= 1
        whole = active if active.group is None else active.group.trunk
        samples = whole.branches or (whole,)
        begun = any(one.tracker.timeline.chosen is not None for one in (whole, *samples))
        used = len(whole.tracker.prompt) + sum(len(sample.tracker.delivered) for sample in samples) if begun else 0
        assert whole.charge is not None, "every admitted request has one"
        shed = not begun and isinstance(outcome.error, Overloaded)
        self.tenants.settle(whole.charge, used, self._clock.now(), counts=not shed)

    def _count(self, active: ActiveRequest) -> None:
        timeline, tokens = active.tracker.timeline, len(active.tracker.delivered)
        counters = self.counters[active.entry.priority]
        objective = self._classes.of(active.entry.priority)
        counters.finished += 1
        if timeline.first_token is None or timeline.last_token is None:
            return
        counters.late += 0 < objective.ttft_ms < 1000 * (timeline.first_token - timeline.arrived)
        if tokens > 1:
            between_ms = 1000 * (timeline.last_token - timeline.first_token) / (tokens - 1)
            counters.slow += 0 < objective.itl_ms < between_ms

    def _check_limits(self, tenant: str, tokens: int) -> None:
        over = self.tenants.over_limit(tenant, tokens, self._clock.now())
        if over is not None:
            self.rate_limited += 1
            whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
            words = f"requests {whose} have used up what is allowed: {over.limit}"
            raise RateLimited(words, over.retry_after_s).with_facts(tenant=tenant, limit=over.limit)

    def _ahead_of(self, request: GenerationRequest, lacking: int) -> Ahead:
        if not len(self._queue):
            return Ahead()
        return self._queue.ahead_of_new(request.priority, tokens=lacking, tenant=request.tenant)

    def _too_late(self, asked: Asked, ahead: Callable[[], Ahead], now: float) -> Overdue | None:
        if not asked.objective_ms and asked.deadline_ms == math.inf:
            return None
        capacity = self._capacity_now(now)
        return None if capacity is None else _judged(asked, ahead(), capacity)

    def _capacity_now(self, now: float) -> Capacity | None:
        if now >= self._looked + CAPACITY_S:
            self._looked = now
            interval_s = self._queue.start_interval_s
            start_ms = None if interval_s is None else 1000 * interval_s
            self._capacity = capacity_of(self._pool.fleet(), start_ms, self._pace.factor)
        return self._capacity


def _judged(asked: Asked, ahead: Ahead, capacity: Capacity) -> Overdue | None:
    if asked.deadline_ms <= 0:
        return None  # its timer ends it, with the right words
    return verdict(asked, forecast(asked, ahead, capacity))


def _shed(overdue: Overdue, share: float) -> Overloaded:
    """`share`: of its objective, that it had."""
    what = "the deadline" if overdue.cause == "deadline" else f"{share:.0%} of the class's objective"
    problem = (
        f"the first token is expected after {overdue.expected_ms:.0f} ms, {what} allows {overdue.allowed_ms:.0f}"
    )
    return Overloaded(problem, min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, overdue.retry_after_s))).with_facts(
        cause=overdue.cause,
        expected_ms=f"{overdue.expected_ms:.0f}",
        allowed_ms=f"{overdue.allowed_ms:.0f}",
    )
