"""What a router tells Prometheus: latencies as its clients see them, counts, and what it knows of its workers.

Histograms are kept by class of request and filled where answers are written, so they hold all that a router adds:
tokenising, queueing, pacing. Nothing has a label that a client can make up.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pdcore.errors import RequestError
from pdcore.types import PriorityClass
from protos import admin_pb2, membership_pb2
from protos.convert import role_from_proto
from router.dispatcher import Dispatcher
from router.stream import Terminal

BUCKETS_S = tuple(round(0.001 * 1.5**step, 6) for step in range(30))
"""1 ms to two minutes, each half as much again: a quantile is known to a fifth or so."""


class Buckets:
    """A histogram of seconds. By hand, since it is added to for every message: prometheus_client's takes a lock, and
    three times as long."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += times
        self._sum += seconds * times

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """Counts of what is not above each bound, ``+Inf`` last; and the sum."""
        bounds, below = [], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            below += count
            bounds.append((bound, float(below)))
        return bounds, self._sum


class Histograms:
    """One histogram for each class of requests."""

    def __init__(self, name: str, words: str) -> None:
        self._name, self._words = name, words
        self._of = {priority: Buckets() for priority in PriorityClass}

    def __getitem__(self, priority: PriorityClass) -> Buckets:
        return self._of[priority]

    def family(self) -> Metric:
        made = HistogramMetricFamily(self._name, self._words, labels=["class"])
        for priority, buckets in self._of.items():
            bounds, total = buckets.cumulated()
            made.add_metric([_label(priority)], bounds, total)
        return made


class CallMetrics:
    """What is counted of clients' requests as their answers are written."""

    def __init__(self) -> None:
        self.ttft = Histograms("pdserve_time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.itl = Histograms(
            "pdserve_inter_token_latency_seconds",
            "Between tokens as they are written; those of one message share the time since the last one.",
        )
        self.tpot = Histograms(
            "pdserve_time_per_output_token_seconds", "Mean time between the tokens of a request, by request."
        )
        self.latency = Histograms("pdserve_request_latency_seconds", "From a request's arrival to its end.")
        self.queued = Histograms("pdserve_request_queue_seconds", "Until a worker was chosen for a request.")
        self.ends: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def written(self, priority: PriorityClass, since_s: float, tokens: int, first: bool) -> None:
        """A message with `tokens` tokens goes out, so long after the last one, or if it is the first after the
        request's arrival."""
        if first:
            self.ttft[priority].add(since_s)
        else:
            self.itl[priority].add(since_s / tokens, tokens)

    def ended(self, priority: PriorityClass, terminal: Terminal, arrived: float, *, first: bool = True) -> None:
        """A sample has ended. `arrived`: its request, seconds on the clock of the timeline. `first`: of its request,
        whose prompt counts once."""
        timeline, label, outcome = terminal.timeline, _label(priority), terminal.outcome
        if timeline.ended is not None:
            self.latency[priority].add(timeline.ended - arrived)
        if timeline.chosen is not None:
            self.queued[priority].add(timeline.chosen - timeline.arrived)
        if terminal.completion_tokens > 1 and timeline.first_token is not None and timeline.last_token is not None:
            decoding = timeline.last_token - timeline.first_token
            self.tpot[priority].add(decoding / (terminal.completion_tokens - 1))
        self.ends[label, outcome.finish.value if outcome.error is None else _kind(outcome.error)] += 1
        if first:
            self.prompt_tokens[label] += terminal.prompt_tokens
            self.cached_tokens[label] += timeline.cached_tokens
        self.tokens[label] += terminal.completion_tokens

    def refused(self, error: RequestError) -> None:
        """A request was not let in."""
        self.refusals[_kind(error)] += 1

    def families(self) -> Iterator[Metric]:
        for histograms in (self.ttft, self.itl, self.tpot, self.latency, self.queued):
            yield histograms.family()
        words = "Requests, or samples of them, that ended: by finish reason, or by error."
        yield _counter("pdserve_requests", words, ["class", "end"], self.ends.items())
        words = "Requests that were not let in, by error."
        yield _counter("pdserve_requests_refused", words, ["error"], _single(self.refusals))
        for name, words, counts in (
            ("pdserve_prompt_tokens", "Prompt tokens of requests that ended.", self.prompt_tokens),
            ("pdserve_cached_prompt_tokens", "Of these, answered by a prefix cache.", self.cached_tokens),
            ("pdserve_generated_tokens", "Tokens generated for requests that ended.", self.tokens),
        ):
            yield _counter(name, words, ["class"], _single(counts))


class RouterMetrics:
    """All of it, as text.

    Args:
        router_id: name within the cluster; a label of nothing but ``pdserve_router_info``.
    """

    def __init__(self, router_id: str, served_name: str, dispatcher: Dispatcher, calls: CallMetrics) -> None:
        self._info = {"router_id": router_id, "model": served_name}
        self._dispatcher = dispatcher
        self._calls = calls
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)

    async def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and text, in the form that the `Accept` header asks for: OpenMetrics, or Prometheus' own.

        Numbers are read at once; writing them down, which takes long with many workers, keeps nobody waiting.
        """
        families = list(self._families())
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        text: bytes = await asyncio.to_thread(lambda: encode(_Fixed(families, self._process)))
        return content_type, text

    def _families(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        yield InfoMetricFamily("pdserve_router", "This router, and the model that it serves.", value=self._info)
        yield from self._calls.families()
        counters = dispatcher.counters
        waiting = [([_label(priority)], dispatcher.waiting_of(priority)) for priority in PriorityClass]
        yield _gauge("pdserve_requests_waiting", "Requests that wait for a worker.", ["class"], waiting)
        yield _gauge("pdserve_requests_running", "Requests that workers have.", [], [([], dispatcher.running)])
        yield _gauge("pdserve_router_draining", "1 if no new requests are let in.", [], [([], dispatcher.draining)])
        words = "1 if a pool is empty, and others do its work."
        yield _gauge("pdserve_degraded", words, [], [([], bool(dispatcher.pool.degraded))])
        words = "Attempts begun, by how and why so."
        yield _counter("pdserve_decisions", words, ["mode", "reason"], counters.decisions.items())
        for name, words, count in (
            ("pdserve_replays", "Times that a request was run again after a failure.", counters.replays),
            ("pdserve_failed_transfers", "KV transfers that did not arrive.", counters.failed_transfers),
            ("pdserve_rebuilds", "Of these requests, those that went on without a transfer.", counters.rebuilds),
            ("pdserve_rate_limited", "Requests refused by their tenant's limits.", dispatcher.admission.rate_limited),
        ):
            yield _counter(name, words, [], [((), count)])
        by_class = dispatcher.admission.counters.items()
        shed = [
            ((_label(priority), reason), getattr(counts, f"shed_{reason}"))
            for priority, counts in by_class
            for reason in ("full", "late", "waiting")
        ]
        yield _counter("pdserve_shed", "Requests shed, by why.", ["class", "reason"], shed)
        yield from self._workers(dispatcher.pool.statuses())

    def _workers(self, statuses: Sequence[admin_pb2.WorkerStatus]) -> Iterator[Metric]:
        serving = membership_pb2.WORKER_STATE_SERVING
        named = [(_worker(status), status) for status in statuses]
        up = [(labels, status.connected and status.state == serving) for labels, status in named]
        yield _gauge("pdserve_worker_up", "1 if the worker is connected and takes requests.", _WORKER, up)
        connected = [(labels, status.load) for labels, status in named if status.connected]
        for field, words in _LOADS.items():
            values = [(labels, getattr(load, field)) for labels, load in connected]
            yield _gauge(f"pdserve_worker_{field}", words, _WORKER, values)
        for field, words in _LOAD_COUNTERS.items():
            counts = [(labels, getattr(load, field)) for labels, load in connected]
            yield _counter(f"pdserve_worker_{field}", words, _WORKER, counts)


_WORKER = ["worker", "role"]
_LOADS = {
    "running": "Sequences in the worker's batch.",
    "waiting": "Sequences that wait for it.",
    "paused": "Sequences whose clients take no tokens.",
    "swapped": "Sequences whose KV is in host memory.",
    "queued_prefill_tokens": "Prompt tokens to be computed.",
    "free_blocks": "Blocks of its KV pool that can be given away.",
    "total_blocks": "Blocks of its KV pool.",
    "cached_blocks": "Blocks in its prefix cache.",
    "open_tickets": "Transfers to it under way.",
    "open_sends": "Transfers from it under way.",
    "step_ms": "Mean duration of its last steps.",
}
_LOAD_COUNTERS = {
    "preemptions": "Sequences preempted there.",
    "cached_tokens": "Prompt tokens that it took from its prefix cache.",
}


class _Fixed(Collector):
    """A registry whose numbers are read already, and the process's own."""

    def __init__(self, families: Iterable[Metric], process: CollectorRegistry) -> None:
        self._families, self._process = families, process

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from self._process.collect()


def _worker(status: admin_pb2.WorkerStatus) -> list[str]:
    return [status.worker.worker_id, role_from_proto(status.worker.role).value]


def _gauge(name: str, words: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for of, value in values:
        family.add_metric(of, float(value))
    return family


def _counter(name: str, words: str, labels: Sequence[str], counts: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = CounterMetricFamily(name, words, labels=labels)
    for of, count in counts:
        family.add_metric(of, float(count))
    return family


def _single(counts: Counter[str]) -> Iterator[tuple[tuple[str], int]]:
    return (((label,), count) for label, count in counts.items())


def _label(priority: PriorityClass) -> str:
    return priority.name.lower()


def _kind(error: RequestError) -> str:
    """``deadline_exceeded`` of a DeadlineExceeded."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
