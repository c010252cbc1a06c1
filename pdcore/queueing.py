"""In which order waiting requests are served: five policies, the same for the router's queue and an engine's. Pure.

========  ============================================================================================================
fcfs      In order of arrival.
sjf       The prompt with the fewest tokens to compute first, with ageing: each later arrival makes a waiting prompt
          count as `sjf_age_tokens` shorter. So fewer than ``tokens / sjf_age_tokens`` of those that came after a
          prompt go ahead of it.
fair      The tenant that has had least goes first, its oldest request in front. A tenant's counter grows by the
          prompt tokens computed for it and by `OUTPUT_TOKEN_PRICE` for each token generated, over its weight. One
          that comes back after a time without waiting requests starts level with those that wait: nobody saves up.
          So of two tenants that always have a request waiting, where one request runs at a time, neither counter is
          ever ahead of the other by more than what one request costs, over its weight.
priority  Interactive requests, then standard, then batch ones; within a class as `fair`, by one account for all
          classes, so in order of arrival where there is one tenant. While batch requests wait, at least `batch_share`
          of the starts are theirs: the next of them is passed by fewer than ``1 / batch_share`` others. An engine
          also takes memory and places from running batch requests for interactive ones (`engine.displacement`).
static    Whole batches in and out: who comes while a batch runs waits until all of it has ended. Kept as the
          baseline that shows what the others are good for.
========  ============================================================================================================

Where tenants share (`fair`, `priority`) requests that had been started before go first, in order of arrival: they are
paid for. A policy orders; what does not fit at present is skipped, a bounded number of times, by whoever applies the
order.

What a policy must remember between two decisions is in a `QueueBook`, which hands out frozen `QueueState`s;
`service_order` is a function of the waiting requests, the configuration and that state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from pdcore.classes import OTHERS
from pdcore.config import SHARING, QueueConfig
from pdcore.types import PriorityClass

OUTPUT_TOKEN_PRICE = 2
"""What a generated token costs, in prompt tokens: it holds a place for a whole step."""
MAX_TENANTS = 4096
"""Counters kept of tenants that have nothing waiting; of more, the lowest are forgotten."""


class Waiting(NamedTuple):
    """A waiting request as a policy sees it.

    Attributes:
        arrival: counts arrivals; the lower is the older.
        tokens: prompt tokens to compute, as far as known without those that a prefix cache has.
        again: it was started before and came back (preempted, refused, or replayed).
    """

    arrival: int
    tokens: int
    tenant: str = ""
    priority: PriorityClass = PriorityClass.STANDARD
    again: bool = False

    @property
    def price(self) -> int:
        """What starting it costs its tenant: the prompt, once."""
        return 0 if self.again else self.tokens


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a policy knows beside the waiting requests.

    Attributes:
        counters: `fair`, `priority`: virtual tokens of every tenant that has a request waiting, and of others that
            had some.
        weights: of tenants, `OTHERS` among them if given; 1 for those that are not there.
        since_batch: `priority`: starts since the last one of a batch request while such requests waited.
        batch_end: `static`: the newest arrival of the batch that is being let in; -1 while it is closed.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    since_batch: int = 0
    batch_end: int = -1
    weights: Mapping[str, float] = field(default_factory=dict)


def service_order(waiting: Sequence[Waiting], config: QueueConfig, state: QueueState) -> Iterator[int]:
    """Indices into `waiting` (any order), who is to be served next first. Lazy: ask for as many as you need."""
    if len(waiting) == 1 and config.policy != "static":
        return iter((0,))  # mostly nobody has to wait for others
    by_arrival = sorted(range(len(waiting)), key=lambda i: waiting[i].arrival)
    match config.policy:
        case "sjf":
            age = config.sjf_age_tokens
            return iter(sorted(by_arrival, key=lambda i: waiting[i].tokens + age * waiting[i].arrival))
        case "fair":
            return _fair(waiting, by_arrival, state.weights, dict(state.counters))
        case "priority":
            return _by_class(waiting, by_arrival, config, state)
        case "static":
            return (i for i in by_arrival if waiting[i].again or waiting[i].arrival <= state.batch_end)
        case _:
            return iter(by_arrival)


def _fair(
    waiting: Sequence[Waiting], by_arrival: Sequence[int], weights: Mapping[str, float], counters: dict[str, float]
) -> Iterator[int]:
    """As if each were started at once, and its prompt charged in `counters`, before the next is chosen.

    `counters` may grow in between, by what others charge.
    """
    queues: dict[str, deque[int]] = {}
    for i in by_arrival:
        if waiting[i].again:
            yield i
        else:
            queues.setdefault(waiting[i].tenant, deque()).append(i)
    usual = weights.get(OTHERS, 1.0)
    # The tenant that had least is in front. What it had since it was put there is looked up when it comes up.
    had = [(counters.get(tenant, 0.0), waiting[queue[0]].arrival, tenant) for tenant, queue in queues.items()]
    heapify(had)
    while had:
        counter, arrival, tenant = had[0]
        now = counters.get(tenant, 0.0)
        if now > counter:
            heapreplace(had, (now, arrival, tenant))
            continue
        queue = queues[tenant]
        i = queue.popleft()
        counters[tenant] = now + waiting[i].price / weights.get(tenant, usual)
        if queue:
            heapreplace(had, (counters[tenant], waiting[queue[0]].arrival, tenant))
        else:
            heappop(had)
        yield i


def _by_class(
    waiting: Sequence[Waiting], by_arrival: Sequence[int], config: QueueConfig, state: QueueState
) -> Iterator[int]:
    counters = dict(state.counters)  # one account, whichever class it is spent in
    classes: dict[PriorityClass, list[int]] = {priority: [] for priority in PriorityClass}
    for i in by_arrival:
        classes[waiting[i].priority].append(i)
    fair = {priority: _fair(waiting, indices, state.weights, counters) for priority, indices in classes.items()}
    batch, lane = fair[PriorityClass.BATCH], chain(fair[PriorityClass.INTERACTIVE], fair[PriorityClass.STANDARD])
    batch_left = len(classes[PriorityClass.BATCH])
    lane_left = len(waiting) - batch_left
    since = state.since_batch
    while batch_left or lane_left:
        if batch_left and (not lane_left or since + 1 >= batch_period(config)):
            since = 0
            batch_left -= 1
            yield next(batch)
        else:
            since += batch_left > 0
            lane_left -= 1
            yield next(lane)


def batch_period(config: QueueConfig) -> float:
    """While batch requests wait, one start in so many is theirs at least."""
    return math.ceil(1 / config.batch_share) if config.batch_share else math.inf


class QueueBook:
    """What the owner of a queue remembers for its policy. Not thread-safe."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self._fair = config.policy in SHARING
        self._weights = {entry.tenant: entry.weight for entry in config.tenant_weights}
        self._other_weight = self._weights.get(OTHERS, 1.0)
        self._counters: dict[str, float] = {}
        self._by_class = config.policy == "priority"
        # Tenants that had a request waiting when last one did, of each class under `priority`, else of all.
        self._present: dict[PriorityClass | None, set[str]] = {}
        self._since_batch = 0
        self._batch_end = -1

    def look(self, waiting: Sequence[Waiting], running: int, places: int | None = None) -> QueueState:
        """The state for deciding about `waiting` now.

        Args:
            running: requests of the queue that have been started and have not ended.
            places: how many may run at once; None if others see to that, by `close_batch`.
        """
        if self._fair:
            self._level(waiting)
        if self.config.policy == "static" and running == 0 and waiting:
            arrivals = sorted(entry.arrival for entry in waiting)
            self._batch_end = arrivals[-1 if places is None else min(places, len(arrivals)) - 1]
        return self.peek()

    def peek(self) -> QueueState:
        """The state as it is, for looking ahead: nothing is decided by it, and nothing changes."""
        counters, weights = MappingProxyType(self._counters), MappingProxyType(self._weights)
        return QueueState(counters, self._since_batch, self._batch_end, weights)

    @property
    def batch_due(self) -> bool:
        """`priority`: whether the next start is to be that of a batch request, if one waits."""
        return self._since_batch + 1 >= batch_period(self.config)

    def started(self, entry: Waiting, stay: Iterable[PriorityClass]) -> None:
        """`entry` leaves the queue to run; `stay`: classes of those that go on waiting."""
        if self._fair:
            self._charge(entry.tenant, entry.price)
        if entry.priority is PriorityClass.BATCH:
            self._since_batch = 0
        elif self.config.policy == "priority" and PriorityClass.BATCH in stay:
            self._since_batch += 1

    def generated(self, tenant: str, tokens: int) -> None:
        """So many tokens were generated for the tenant."""
        if self._fair:
            self._charge(tenant, OUTPUT_TOKEN_PRICE * tokens)

    def close_batch(self) -> None:
        """`static`: the batch has all that can run at once; who still waits is of the next one."""
        self._batch_end = -1

    def _charge(self, tenant: str, tokens: float) -> None:
        self._counters[tenant] = self._counters.get(tenant, 0.0) + tokens / self._weights.get(
            tenant, self._other_weight
        )

    def _level(self, waiting: Sequence[Waiting]) -> None:
        """Lift who comes to wait to the lowest counter of those that waited already: idleness earns nothing.

        Those are who wait in the same class: in a lower one somebody may be kept waiting with little for long.
        """
        groups: dict[PriorityClass | None, set[str]] = {}
        for entry in waiting:
            groups.setdefault(entry.priority if self._by_class else None, set()).add(entry.tenant)
        for group, present in groups.items():
            before = self._present.get(group, set())
            self._present[group] = present
            new = present - before
            if not new:
                continue
            stayed = (present & before) or before
            floor = min((self._counters.get(tenant, 0.0) for tenant in stayed), default=0.0)
            for tenant in new:
                self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._forget_idle(set().union(*groups.values()))

    def _forget_idle(self, present: set[str]) -> None:
        if len(self._counters) > len(present) + MAX_TENANTS:
            idle = sorted(self._counters.keys() - present, key=lambda tenant: self._counters[tenant])
            for tenant in idle[: len(idle) - MAX_TENANTS]:
                del self._counters[tenant]
