"""Starts waiting requests when there is room for them, and ends those for which there will be none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pdcore.clock import Clock
from pdcore.errors import NoWorker, RequestError, Unavailable
from pdcore.types import PriorityClass
from router.active import ActiveRequest, Counters
from router.admission import AdmissionQueue, QueueEntry
from router.admission_control import AdmissionControl
from router.effects import Effect
from router.fleet import Mask
from router.links import Links
from router.policy import NoRoute, Route, RouteRequest, choose
from router.prefixes import Prefixes
from router.ranking import USES_PREFIXES
from router.rebuild import TransferRates
from router.worker_pool import WorkerPool

PUMP_INTERVAL_S = 0.001


class QueuePump:
    """Between the queue and the workers. Everything happens on one event loop.

    Args:
        active: the requests that have not ended, by id.
        prefixes: what workers have cached. policy: see `router.ranking`. disaggregate: see `router.policy`.
        admission: gives up what cannot be in time, and holds back batch requests.
        rates, links: what is known of KV transfers.
        counters: gets the decisions.
        no_route_grace_s: seconds that requests wait while no worker could ever take them.
        seed: 32 bits of the router; routers that see the same workers draw differently by it.
        first_start: called for every request that starts and did not before.
        perform: carries out what a request's tracker decided. abandon: ends a request with an error. bug: the same,
            with one that is ours.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        pool: WorkerPool,
        active: Mapping[str, ActiveRequest],
        prefixes: Prefixes,
        clock: Clock,
        *,
        admission: AdmissionControl,
        policy: str,
        disaggregate: str,
        rates: TransferRates,
        links: Links,
        no_route_grace_s: float,
        seed: int,
        counters: Counters,
        first_start: Callable[[], None],
        perform: Callable[[ActiveRequest, Sequence[Effect]], None],
        abandon: Callable[[ActiveRequest, RequestError], None],
        bug: Callable[[ActiveRequest, Exception], None],
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._active = active
        self._prefixes = prefixes
        self._admission = admission
        self._clock = clock
        self._policy = policy
        self._disaggregate = disaggregate
        self._rates = rates
        self._links = links
        self._counters = counters
        self._no_route_grace_s = no_route_grace_s
        self._first_start = first_start
        self._draw = seed << 32  # in the upper half, so that no router follows another a few draws behind
        self._perform = perform
        self._abandon = abandon
        self._bug = bug
        self._stopped = False
        self._soon_timer: asyncio.TimerHandle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._no_route_timer: asyncio.TimerHandle | None = None

    @property
    def patience_is_running(self) -> bool:
        """Whether waiting requests will be ended for want of workers, unless one comes."""
        return self._no_route_timer is not None and not self._no_route_timer.cancelled()

    def run(self) -> None:
        """Start everything that can start now."""
        if self._soon_timer is not None:
            self._soon_timer.cancel()
            self._soon_timer = None
        now = self._clock.now()
        broken: dict[ActiveRequest, Exception] = {}

        def route_for(entry: QueueEntry) -> Route | None:
            active = self._active[entry.request_id]
            try:
                held_back = self._admission.held_back(active)
                return None if held_back.waits else self._route(active, now, held_back.closed)
            except Exception as error:  # noqa: BLE001  # one request's bug must not keep others waiting
                broken[active] = error
                return None

        while self._queue:
            if self._pool.fleet().empty:
                break
            started = self._queue.start_next(now, route_for)
            if started is None:
                break
            if not started.entry.again:
                self._first_start()
            active = self._active[started.entry.request_id]
            try:
                self.start(active, started.route, now)
            except Exception as error:  # noqa: BLE001  # what it has on workers and in books is to be given back
                broken[active] = error
        for active, bug in broken.items():
            self._bug(active, bug)
        if broken:
            self.run_soon()
        for active, shed in self._admission.overdue():
            self._abandon(active, shed)
        self._give_up_stranded(now)
        self._arm_wake(now)

    def run_soon(self) -> None:
        """Many causes in a short time need one look at the queue."""
        if self._soon_timer is None and self._queue:
            self._soon_timer = asyncio.get_running_loop().call_later(PUMP_INTERVAL_S, self.run)

    def start(self, active: ActiveRequest, route: Route, now: float) -> None:
        """Begin a request's next attempt."""
        tracker = active.tracker
        joining = [sample for sample in active.branches if sample.waits]
        branches = tuple(sample.tracker.join(route, now, tracker.timeline) for sample in joining)
        effects = tracker.dispatch(route, now, branches)
        for sample in joining:
            sample.joined = sample.tracker.attempt
        computes = route.prefill or route.decode
        self._counters.decisions[route.mode, route.reason] += 1
        workers = dict.fromkeys((route.decode, computes))
        self._admission.started(active, computes, route.lacking)
        for worker_id in workers:
            tokens = route.lacking if worker_id == computes else 0
            self._pool.assign(
                worker_id,
                tracker.key,
                prefill_tokens=tokens,
                cache_tokens=tracker.prompt_tokens + 1,
                priority=active.entry.priority,
            )
        self._prefixes.expect(workers, active.names)
        self._perform(active, effects)

    def workers_changed(self) -> None:
        """Workers came or went, or changed their role."""
        if self._pool.route_possible:
            if self._no_route_timer is not None:
                self._no_route_timer.cancel()
                self._no_route_timer = None
            self.run_soon()
        elif self._no_route_timer is None:
            self._arm_give_up()

    def stop(self) -> None:
        """Start nothing any more: the sessions' end is no news."""
        self._stopped = True
        for timer in (self._soon_timer, self._wake_timer, self._no_route_timer):
            if timer is not None:
                timer.cancel()

    def _route(self, active: ActiveRequest, now: float, closed: Mask | None = None) -> Route | None:
        self._draw += 1
        asked, bad = self._asked(active, now, closed), self._pool.health.shunned() | active.unfit
        chosen = choose(replace(asked, exclude=asked.exclude | bad) if bad else asked, self._pool.fleet())
        if bad and isinstance(chosen, NoRoute) and not chosen.busy:
            # None of the others could ever take it: rather one that fails than none.
            chosen = choose(replace(asked, avoid=asked.avoid | bad), self._pool.fleet())
        if isinstance(chosen, NoRoute):
            if chosen.busy:
                active.no_route_since = None
            elif active.no_route_since is None:
                active.no_route_since = now
            return None
        active.no_route_since = None
        return chosen

    def _give_up_stranded(self, now: float) -> None:
        """There are workers, but for the whole grace none that could ever take a request: it ends."""
        if not self._pool.route_possible:
            return  # `_give_up_waiting` sees to that, and names the cause
        for active in self._waiting():
            since = active.no_route_since
            if since is None or now < since + self._no_route_grace_s:
                continue
            self._route(active, now)  # a look may be long ago
            if active.no_route_since is not None:
                self._abandon(active, Unavailable("no connected worker's KV cache holds the request", None))

    def _arm_wake(self, now: float) -> None:
        """Look again when a delay or a refusal ends."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        waiting = self._waiting()
        times = [until for active in waiting for until in active.refused.values()]
        times += [a.no_route_since + self._no_route_grace_s for a in waiting if a.no_route_since is not None]
        wake = self._queue.next_wake(now)
        due = [time for time in times if time > now] + ([] if wake is None else [wake])
        if due:
            delay = min(due) - now
            self._wake_timer = asyncio.get_running_loop().call_later(delay, self.run_soon)

    def _arm_give_up(self) -> None:
        if not self._stopped:
            loop = asyncio.get_running_loop()
            self._no_route_timer = loop.call_later(self._no_route_grace_s, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        """No worker could take a request for the whole grace."""
        problem = f"no worker has been connected for {self._no_route_grace_s:g} s"
        for request_id in self._queue.waiting():
            self._abandon(self._active[request_id], NoWorker(problem))
        self._arm_give_up()

    def _asked(self, active: ActiveRequest, now: float, closed: Mask | None) -> RouteRequest:
        """What a route is asked for."""
        tracker = active.tracker
        return RouteRequest(
            prompt_tokens=tracker.prompt_tokens,
            total_tokens=len(tracker.prompt) + tracker.params.max_tokens,
            samples=max(1, sum(sample.waits for sample in active.branches)),
            resumes=bool(tracker.delivered),
            interactive=active.entry.priority is PriorityClass.INTERACTIVE,
            rebuild=active.rebuild,
            local_only=active.local_only,
            exclude=frozenset([worker for worker, until in active.refused.items() if until > now]),
            closed=closed,
            avoid=active.avoid,
            policy=self._policy,
            cached=self._prefixes.cached(active.names) if self._by_prefix(active) else None,
            draw=self._draw,
            links=self._links,
            disaggregate=self._disaggregate,
            handover_ms=self._rates.handover_ms,
            itl_ms=self._admission.itl_ms,
        )

    def _by_prefix(self, active: ActiveRequest) -> bool:
        """Whether it matters what is cached of its prompt. Where prompt tokens are scored, nothing is taken from a
        cache."""
        return self._policy in USES_PREFIXES and active.tracker.params.prompt_logprobs is None

    def _waiting(self) -> list[ActiveRequest]:
        return [active for active in map(self._active.get, self._queue.waiting()) if active is not None]
