"""The queue of requests that wait for a worker: bounded for each class, ordered, and without starvation."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pdcore.config import QueueConfig
from pdcore.queueing import QueueBook, Waiting, service_order
from pdcore.types import PriorityClass
from router.shedding import Ahead

MIN_RETRY_AFTER_S = 0.5
MAX_RETRY_AFTER_S = 30.0
MIN_STARTS = 8
"""Times between starts that have to be seen before their mean says anything."""


@dataclass(slots=True)
class QueueEntry:
    """A waiting request.

    Attributes:
        arrival: counts arrivals; a request that comes back keeps its own and so its place.
        tokens: of its prompt; where it matters, without those that a worker had cached when it came.
        tenant: who it is for. came: when it did. deadline: its client's (both seconds, the caller's clock).
        not_before: it is not started before this time (seconds, the caller's clock).
        passed: how often a request behind it was started while it did not fit.
        again: it was started before and has come back.
    """

    request_id: str
    priority: PriorityClass
    arrival: int
    tokens: int = 0
    tenant: str = ""
    came: float = 0.0
    deadline: float = math.inf
    not_before: float = 0.0
    passed: int = 0
    again: bool = False

    @property
    def waiting(self) -> Waiting:
        """It as the queue's policy sees it."""
        return Waiting(self.arrival, self.tokens, self.tenant, self.priority, self.again)


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits."""

    entry: QueueEntry


@dataclass(frozen=True, slots=True)
class Shed:
    """The class has `max_queue` requests waiting. `retry_after_s`: when a place is likely to be free, in seconds."""

    retry_after_s: float
    max_queue: int


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started(Generic[T]):
    """A request leaves the queue; `route` is what the caller's test returned for it."""

    entry: QueueEntry
    route: T


@dataclass(slots=True)
class _StartRate:
    """Mean interval between starts, in seconds, over the last handful."""

    interval_s: float = 0.1
    last: float | None = None
    seen: int = 0

    def started(self, now: float, still_waiting: bool) -> None:
        if self.last is not None:
            self.interval_s += 0.1 * (now - self.last - self.interval_s)
            self.seen += 1
        # The time to the next start says how fast the queue moves only if somebody waits.
        self.last = now if still_waiting else None


@dataclass(slots=True)
class AdmissionQueue:
    """Waiting requests, started in the order of the queue's policy (`pdcore.queueing`).

    A request that does not fit now may be passed by at most `max_passes` later ones; from then on nothing behind it
    starts before it does, so that it is not starved by smaller ones. At most `look_ahead` requests that do not fit
    are looked past, which bounds the cost of a call.

    Under the policy `priority` batch requests fill gaps: while another one waits that could start if there were room,
    a batch request starts only when it is its turn by `batch_share`.

    Args:
        max_queue: waiting requests of a class at most, where `max_by_class` says nothing else. config: the policy.
    """

    max_queue: int
    config: QueueConfig = field(default_factory=QueueConfig)
    max_by_class: Mapping[PriorityClass, int] = field(default_factory=dict)
    max_passes: int = 32
    look_ahead: int = 16
    _entries: list[QueueEntry] = field(default_factory=list)  # the oldest first
    _by_class: Counter[PriorityClass] = field(default_factory=Counter)
    _running: set[str] = field(default_factory=set)
    _book: QueueBook = field(init=False)
    _arrivals: int = 0
    _rate: _StartRate = field(default_factory=_StartRate)

    def __post_init__(self) -> None:
        self._book = QueueBook(self.config)

    def __len__(self) -> int:
        return len(self._entries)

    def offer(
        self,
        request_id: str,
        priority: PriorityClass,
        *,
        tokens: int = 0,
        tenant: str = "",
        now: float = 0.0,
        deadline: float = math.inf,
    ) -> Queued | Shed:
        """A new request. It waits, or is shed if enough of its class do."""
        max_queue = self.max_by_class.get(priority, self.max_queue)
        if self.waiting_of(priority) >= max_queue:
            return Shed(self.retry_after_s(), max_queue)
        entry = QueueEntry(request_id, priority, self._arrivals, tokens, tenant, now, deadline)
        self._arrivals += 1
        self._insert(entry)
        return Queued(entry)

    def sample_of(self, entry: QueueEntry, request_id: str) -> QueueEntry:
        """A place for one sample of a request. It does not wait: it goes with the request, until it is put back."""
        sample = replace(entry, request_id=request_id, arrival=self._arrivals)
        self._arrivals += 1
        return sample

    def goes_on(self, sample: QueueEntry) -> None:
        """A sample runs on by itself: whoever waits for what runs waits for it too."""
        self._running.add(sample.request_id)

    def put_back(self, entry: QueueEntry, not_before: float) -> None:
        """A request that was started could not go on. It gets its old place, and is never shed."""
        entry.not_before = not_before
        entry.again = True
        self._running.discard(entry.request_id)
        self._insert(entry)

    def remove(self, request_id: str) -> bool:
        """A request has ended; False if it was not waiting."""
        self._running.discard(request_id)
        for index, entry in enumerate(self._entries):
            if entry.request_id == request_id:
                self._take(index)
                return True
        return False

    def generated(self, entry: QueueEntry, tokens: int) -> None:
        """So many tokens of a request have been generated."""
        self._book.generated(entry.tenant, tokens)

    def start_next(self, now: float, route_for: Callable[[QueueEntry], T | None]) -> Started[T] | None:
        """Take the first request for which `route_for` has a route; None if nothing can start now.

        Call again until None: a start changes what fits.
        """
        passed: list[QueueEntry] = []
        urgent_wait = False
        waiting = [entry.waiting for entry in self._entries]
        state = self._book.look(waiting, len(self._running))
        for index in service_order(waiting, self.config, state):
            entry = self._entries[index]
            if entry.not_before > now:
                continue  # it waits by itself, for no room, and holds nobody up
            may_start = not (urgent_wait and entry.priority is PriorityClass.BATCH)
            route = route_for(entry) if may_start else None
            if route is not None:
                self._take(index)
                for other in passed:
                    other.passed += 1
                self._running.add(entry.request_id)
                self._book.started(entry.waiting, (other.priority for other in self._entries))
                self._rate.started(now, still_waiting=bool(self._entries))
                return Started(entry, route)
            passed.append(entry)
            # Batch requests behind it would take what comes free.
            urgent_wait |= entry.priority is not PriorityClass.BATCH and self.config.policy == "priority"
            if entry.passed >= self.max_passes or len(passed) >= self.look_ahead:
                break
        # Whatever fits has been started: the batch is complete.
        self._book.close_batch()
        return None

    def next_wake(self, now: float) -> float | None:
        """The earliest time after `now` at which a request that waits out a delay may start; None if none does."""
        return min((e.not_before for e in self._entries if e.not_before > now), default=None)

    def waiting(self) -> list[str]:
        """Request ids, the oldest first."""
        return [entry.request_id for entry in self._entries]

    def waiting_of(self, priority: PriorityClass) -> int:
        """How many of the class wait."""
        return self._by_class[priority]

    @property
    def batch_due(self) -> bool:
        """Whether the next start is a batch request's by `batch_share`, if one waits."""
        return self._book.batch_due

    @property
    def start_interval_s(self) -> float | None:
        """Mean time between two starts while requests waited, of the last handful; None before there are enough."""
        return self._rate.interval_s if self._rate.seen >= MIN_STARTS else None

    def ahead_of_new(self, priority: PriorityClass, *, tokens: int, tenant: str) -> Ahead:
        """What would be served before a request that came now."""
        new = Waiting(self._arrivals, tokens, tenant, priority)
        for entry, ahead in self._in_order(new):
            if entry is None:
                return ahead
        raise AssertionError("the order has every request")

    def ahead_of_waiting(self) -> Iterator[tuple[QueueEntry, Ahead]]:
        """The waiting requests in the order of service, as it is now, and what is served before each."""
        for entry, ahead in self._in_order():
            assert entry is not None
            yield entry, ahead

    def _in_order(self, *new: Waiting) -> Iterator[tuple[QueueEntry | None, Ahead]]:
        """Entries, or None for a new one, and what is ahead of each. Those of a later batch (`static`) come last."""
        entries: list[QueueEntry | None] = [*self._entries, *(None for _ in new)]
        waiting = [*(entry.waiting for entry in self._entries), *new]
        order = list(service_order(waiting, self.config, self._book.peek()))
        if len(order) < len(waiting):
            listed = frozenset(order)
            order += [index for index in range(len(waiting)) if index not in listed]
        tokens = 0
        for requests, index in enumerate(order):
            yield entries[index], Ahead(tokens, requests)
            tokens += waiting[index].tokens

    def retry_after_s(self) -> float:
        """When the queue is likely to have moved on by a quarter, in seconds."""
        estimate = self._rate.interval_s * max(1, len(self._entries) // 4)
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, estimate))

    def _insert(self, entry: QueueEntry) -> None:
        bisect.insort(self._entries, entry, key=lambda e: e.arrival)
        self._by_class[entry.priority] += 1

    def _take(self, index: int) -> None:
        self._by_class[self._entries.pop(index).priority] -= 1
