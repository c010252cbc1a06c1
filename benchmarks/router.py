"""What a routing decision costs that looks for cached prefixes on every worker, on one core.

    python -m benchmarks.router decisions --workers 1000 --tokens 12000 --json build/router.json

What the router costs and adds after that is measured by the others:

    python -m benchmarks.router relay      tokens and messages for a second of its CPU, and how late they are
    python -m benchmarks.router ttft       time to first token, beside the same workers driven without a router
    python -m benchmarks.router prompts    other streams' tokens while prompts of 10,000 tokens are tokenised

Simulated are the workers: nothing is computed and nothing is sent. Their caches are lists of names that fill up with
conversations behind shared system prompts, and give up the oldest path when they are full, ends first, as an engine
does. Two in five are prefill workers, the others decode workers. Every prompt has `--tokens` tokens: it goes on with
a conversation, begins one, or is like no other. A decision is the router's own: who holds how much of the prompt
(`cached`), which mode and workers are the best by cost (`choose`), and what both workers have more to do from now on
(`note`: in the router's books, in the columns that it chooses by, and as what they will soon have cached); names are
there already, as fresh objects, as hashing leaves them. In rounds: some decisions one after the other, then as many
workers announce what they computed of earlier prompts and what they gave up (`apply`).

Before each decision the request's first token is foretold, as for every interactive request that comes, to see
whether it can be in time (`foresee`): what the workers can do is looked at anew, and some prompts are ahead of it.

Times are CPU time of the thread, since nothing here waits, and other work on the machine should not count; reading
the clock, which the table shows, is in them. Hashing a prompt is measured apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import numpy as np
import psutil

from benchmarks import router_prompts, router_relay, router_ttft
from benchmarks.router_traffic import BLOCK_SIZE, Name, SimulatedWorker, Traffic
from pdcore.clock import ManualClock
from pdcore.hashing import block_hashes, chain_root
from pdcore.step_time import StepTime
from pdcore.types import PriorityClass, RequestKey, Role, WorkerLoad
from protos import worker_pb2
from router.capacity import capacity_of
from router.fleet import Fleet
from router.links import Links
from router.policy import Route, RouteRequest, choose
from router.prefixes import Prefixes, PromptNames
from router.shedding import Ahead, Asked, forecast
from router.snapshot import WorkerSnapshot
from router.worker_book import WorkerBook
from router.worker_sets import WorkerNumbers

NAMING = ("benchmark", 16)
DECISION_S = 0.0002
"""Simulated time between two decisions: 5,000 a second."""

ROUND = 50
"""Decisions between which no events come."""

AHEAD = 4
"""Prompts that wait in the router when a first token is foretold."""
START_MS = 20.0
"""Between two of their starts."""


@dataclass(frozen=True)
class Result:
    """What `--json` gets; microseconds of CPU time unless a name says otherwise.

    Attributes:
        foresee: when its first token is expected. decide: `cached` and `choose`. route: these two and `note`.
        clock: reading it once.
        local: share of the decisions for one worker that does both.
        hash_prompt: naming the blocks of a prompt of `tokens` tokens.
        bytes_per_entry: growth of the process over the known pairs, names included.
    """

    workers: int
    tokens: int
    decisions: int
    seed: int
    entries: int
    names: int
    bytes_per_entry: float
    hit_rate: float
    local: float
    foresee: dict[str, float]
    decide: dict[str, float]
    route: dict[str, float]
    decisions_per_s: float
    events_per_s: float
    events_per_decision: float
    longest_apply: float
    hash_prompt: float
    clock: float


class Named(PromptNames):
    """A prompt whose names are there already."""

    def __init__(self, hashes: list[Name]) -> None:
        super().__init__((), "")
        self._hashes = hashes
        self.joined(NAMING)

    def by(self, naming: tuple[str, int]) -> list[Name]:
        return self._hashes


@dataclass(frozen=True, slots=True)
class Sent:
    """A decision that its workers have not announced: which one computes, and which decodes."""

    key: RequestKey
    hashes: list[Name]
    computes: int
    decodes: int


class Run:
    """Workers, what a router knows of them, and decisions one after the other."""

    def __init__(self, workers: int, tokens: int, capacity: int, seed: int) -> None:
        rng = random.Random(seed)
        self.traffic = Traffic(rng, tokens)
        self.workers = [SimulatedWorker(capacity) for _ in range(workers)]
        self.clock = ManualClock()
        self.numbers = WorkerNumbers()
        self.prefixes = Prefixes(self.clock, self.numbers, max_blocks=2 * workers * capacity)
        self.fleet = Fleet()
        self.links = Links()
        for prefill in range(0, 2 * workers // 5, 2):
            for decode in range(2 * workers // 5, workers, 3):
                self.links.seen(prefill, decode, rng.uniform(0.01, 0.2))
        self.ids = [f"worker-{number}" for number in range(workers)]
        self.roles = [Role.PREFILL if number < 2 * workers // 5 else Role.DECODE for number in range(workers)]
        self.loads = [self._load(role, rng) for role in self.roles]
        self.books = [WorkerBook() for _ in range(workers)]
        for number, worker_id in enumerate(self.ids):
            self.numbers.take(worker_id)
            self.prefixes.connected(worker_id, NAMING)
            self._put(number)
        self.times: dict[str, list[int]] = {"foresee": [], "decide": [], "route": [], "apply": []}
        self.events = self.hits = self.local = 0
        self._sent: deque[Sent] = deque()

    def _load(self, role: Role, rng: random.Random) -> WorkerLoad:
        return WorkerLoad(
            queued_prefill_tokens=int(rng.expovariate(1 / self.traffic.tokens)) if role is Role.PREFILL else 0,
            running=0 if role is Role.PREFILL else rng.randrange(32),
            free_blocks=rng.randrange(100_000, 200_000),
            total_blocks=200_000,
            step_time=StepTime(10.0, rng.uniform(0.05, 0.1), 1e-6, steps=99, largest=8192),
        )

    def _put(self, number: int) -> None:
        """Its row as it is now, made as `WorkerPool` makes it; it has just reported."""
        book = self.books[number]
        row = WorkerSnapshot(
            worker_id=self.ids[number],
            role=self.roles[number],
            load=self.loads[number],
            block_size=BLOCK_SIZE,
            max_requests=256,
            max_queued_prefill_tokens=1 << 20,
            mine=book.in_flight(),
            decisions=book.decisions,
            max_num_batched_tokens=8192,
        )
        self.fleet.put(number, row, self.clock.now())

    def fill(self) -> float:
        """Fill every cache; returns by how many bytes the process grew over that for a known pair."""
        batches = []
        for number, worker in enumerate(self.workers):
            while worker.following < worker.capacity:
                first = worker.following
                batches.append((number, news(first, worker.run(self.traffic.conversation()))))
        before = psutil.Process().memory_info().rss
        for number, message in batches:
            self.prefixes.hear(self.ids[number], message)
        return (psutil.Process().memory_info().rss - before) / self.prefixes.counts.known

    def round(self, decisions: int, delay: int) -> None:
        """So many decisions; then the workers of those `delay` decisions ago announce what they did."""
        for hashes in [self.traffic.prompt() for _ in range(decisions)]:
            self._decide(hashes)
        while len(self._sent) > delay:
            self._announce(self._sent.popleft())

    def _decide(self, hashes: list[Name]) -> None:
        self.clock.advance(DECISION_S)
        prompt, tokens, now = Named(hashes), self.traffic.tokens, self.clock.now()
        key, blocks = RequestKey(f"request-{len(self.times['decide'])}", 0), -(-(tokens + 1) // BLOCK_SIZE)
        self._foresee()
        start = time.thread_time_ns()
        self.fleet.settle(now)
        cached = self.prefixes.cached(prompt)
        asked = RouteRequest(
            tokens, tokens + 256, cached=cached, draw=len(self.times["decide"]), links=self.links, disaggregate="auto"
        )
        route = choose(asked, self.fleet)
        decided = time.thread_time_ns()
        assert isinstance(route, Route), route
        decodes = self.fleet.number_of[route.decode]
        computes = decodes if route.prefill is None else self.fleet.number_of[route.prefill]
        chosen = {computes, decodes}
        for number in chosen:
            lacking = route.lacking if number == computes else 0
            self.books[number].assign(key, lacking, blocks, PriorityClass.STANDARD)
            self._put(number)
        self.prefixes.expect([self.ids[number] for number in chosen], prompt)
        noted = time.thread_time_ns()
        self.times["decide"].append(decided - start)
        self.times["route"].append(noted - start)
        self.hits += len(hashes) * BLOCK_SIZE - route.lacking
        self.local += route.prefill is None
        self._sent.append(Sent(key, hashes, computes, decodes))

    def _foresee(self) -> None:
        tokens = self.traffic.tokens
        asked, ahead = Asked(tokens, tokens // 2), Ahead(AHEAD * tokens, AHEAD)
        start = time.thread_time_ns()
        capacity = capacity_of(self.fleet, START_MS, 1.0)
        assert capacity is not None
        forecast(asked, ahead, capacity)
        self.times["foresee"].append(time.thread_time_ns() - start)

    def _announce(self, sent: Sent) -> None:
        for number in {sent.computes, sent.decodes}:
            self.books[number].release(sent.key)
            self._put(number)
            worker = self.workers[number]
            first = worker.following
            events = worker.run(sent.hashes)
            message = news(first, events)
            start = time.thread_time_ns()
            self.prefixes.hear(self.ids[number], message)
            self.times["apply"].append(time.thread_time_ns() - start)
            self.events += len(events)


def news(first: int, events: list[tuple[bool, Name]]) -> worker_pb2.CacheEvents:
    """As a worker tells it: `reset` with its first one."""
    runs: list[int] = []
    for added, _ in events:
        step = 1 if added else -1
        if runs and runs[-1] * step > 0:
            runs[-1] += step
        else:
            runs.append(step)
    names = b"".join(name for _, name in events)
    return worker_pb2.CacheEvents(first=first, names=names, runs=runs, reset=not first)


def percentiles(times_ns: list[int]) -> dict[str, float]:
    """Microseconds."""
    p50, p95, p99 = np.percentile(times_ns, (50, 95, 99)) / 1000
    return {"median": float(p50), "p95": float(p95), "p99": float(p99)}


def median_us(function: Callable[[], object], rounds: int) -> float:
    times: list[int] = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        function()
        times.append(time.thread_time_ns() - start)
    return percentiles(times)["median"]


def measure(args: argparse.Namespace) -> Result:
    workers, tokens, decisions, seed = args.workers, args.tokens, args.decisions, args.seed
    run = Run(workers, tokens, args.capacity, seed)
    bytes_per_entry = run.fill()
    gc.collect()
    gc.freeze()  # the simulated workers are not a router's, and shall not cost it collections
    for done in range(0, decisions, ROUND):
        run.round(min(ROUND, decisions - done), args.delay)
    counts = run.prefixes.counts
    prompt = [random.Random(seed).randrange(2**17) for _ in range(tokens)]
    return Result(
        workers=workers,
        tokens=tokens,
        decisions=decisions,
        seed=seed,
        entries=counts.known,
        names=counts.names,
        bytes_per_entry=bytes_per_entry,
        hit_rate=run.hits / decisions / tokens,
        local=run.local / decisions,
        foresee=percentiles(run.times["foresee"]),
        decide=percentiles(run.times["decide"]),
        route=percentiles(run.times["route"]),
        decisions_per_s=1e9 * decisions / sum(run.times["route"]),
        events_per_s=1e9 * run.events / max(1, sum(run.times["apply"])),
        events_per_decision=run.events / max(1, len(run.times["apply"])),
        longest_apply=max(run.times["apply"], default=0) / 1000,
        hash_prompt=median_us(lambda: block_hashes(chain_root("benchmark"), prompt, BLOCK_SIZE), 50),
        clock=median_us(lambda: None, 1000),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=12_000, help="of every prompt")
    parser.add_argument("--capacity", type=int, default=4096, help="blocks in a worker's cache")
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--delay", type=int, default=1000, help="decisions until a worker announces its prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)


def decisions(args: argparse.Namespace) -> None:
    result = measure(args)
    print(
        f"{result.workers} simulated workers with {args.capacity} blocks each: {result.entries:,} known blocks, "
        f"{result.names:,} names, {result.bytes_per_entry:.0f} bytes per known block"
    )
    print(
        f"{result.decisions:,} decisions; prompts of {result.tokens:,} tokens, {result.hit_rate:.0%} cached there; "
        f"{result.local:.0%} for one worker\n"
    )
    print(f"{'CPU time':24} {'median':>8} {'P95':>8} {'P99':>8}   us")
    for name, times in (("foresee", result.foresee), ("decide", result.decide), ("decide, note", result.route)):
        print(f"{name:24} {times['median']:8.1f} {times['p95']:8.1f} {times['p99']:8.1f}")
    print(f"{'hash a prompt':24} {result.hash_prompt:8.1f}")
    print(f"{'read the clock':24} {result.clock:8.1f}\n")
    print(f"{result.decisions_per_s:,.0f} decisions/s on one core, notes included and events not")
    print(
        f"{result.events_per_s:,.0f} events/s on one core; {result.events_per_decision:.0f} events for a decision, "
        f"longest apply {result.longest_apply / 1000:.1f} ms"
    )
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2))


def main(arguments: Sequence[str] | None = None) -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    modes = parser.add_subparsers(required=True)
    mine = modes.add_parser("decisions", description=__doc__, formatter_class=layout)
    add_arguments(mine)
    mine.set_defaults(run=decisions)
    for name, module in (("relay", router_relay), ("ttft", router_ttft), ("prompts", router_prompts)):
        mode = modes.add_parser(name, description=module.__doc__, formatter_class=layout)
        module.add_arguments(mode)
        mode.set_defaults(run=module.main)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
