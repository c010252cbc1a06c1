"""Goodput of a router as it is offered more than its workers can do: with shedding, and without.

    python -m benchmarks.goodput --seconds 60 --json build/goodput.json

**The workers are simulated**: they compute nothing and take as long as a cost model says
(`tests.support.cost_worker`, ``step = base + token * tokens``), but they are spoken to through the real worker and
KV interfaces over real gRPC, and report step times fitted to their steps as an engine does. Router, queue, client
and the clock are real; all of it runs in this process, on one event loop. So the costs are chosen such that one
core is not the limit (``cpu`` shows what was used); where the machine has other work to do, `--scale` slows workers
and objectives down alike.

First the capacity is measured: `--clients` clients that send the next request when the last one has ended. Then
requests arrive by a Poisson process (an open loop: nobody waits for anybody) at multiples of that. Three in ten are
interactive, four standard, three batch, of different lengths. A request counts as good if it ended well and its
first token and the mean time between its tokens were within its class's objectives, as its client saw them; batch
requests have none. Goodput is good requests a second that ended in the measured time, which leaves out `--warmup`
seconds at the beginning; what has not ended by then is cancelled. *off* is the same router without objectives and
with an endless queue, so that it neither sheds nor holds batch requests back; each load is sent to both.

The script states, it does not judge: it ends well whatever it finds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

from pdcore.classes import ClassObjective, ClassObjectives
from pdcore.config import QueueConfig
from pdcore.errors import Overloaded
from pdcore.types import PriorityClass, Role
from router.client import Sampling
from tests.support.cost_worker import Costs, CostWorker
from tests.support.null_cluster import NullCluster
from tests.support.tiny_model import tiny_llama

OBJECTIVES = ClassObjectives(
    interactive=ClassObjective(ttft_ms=1000.0, itl_ms=60.0),
    standard=ClassObjective(ttft_ms=3000.0, itl_ms=100.0),
    batch=ClassObjective(),
)
NONE = ClassObjectives(ClassObjective(), ClassObjective(), ClassObjective())
ENDLESS = 1_000_000

Words = tuple[PriorityClass, int, int]


@dataclass(frozen=True, slots=True)
class Mix:
    """Of one class: its share of the requests, and from where to where their lengths are drawn, evenly."""

    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]


MIX = {
    PriorityClass.INTERACTIVE: Mix(0.3, (64, 256), (8, 24)),
    PriorityClass.STANDARD: Mix(0.4, (256, 1024), (16, 48)),
    PriorityClass.BATCH: Mix(0.3, (512, 1536), (16, 48)),
}


@dataclass(slots=True)
class Tally:
    """Of one class, or of all."""

    offered: int = 0
    finished: int = 0
    good: int = 0
    shed: int = 0
    late: int = 0
    slow: int = 0


@dataclass(slots=True)
class Load:
    """One run; what `--json` gets. Rates in requests a second.

    Attributes:
        factor: of the capacity. shedding: on or off. offered, finished, shed, goodput: a second.
        unfinished: had not ended when the run did. cpu: of one core, by this process.
        ttft_p99_ms: of the requests that finished, by class.
    """

    factor: float
    shedding: bool
    seconds: float
    offered: float = 0.0
    finished: float = 0.0
    shed: float = 0.0
    goodput: float = 0.0
    unfinished: int = 0
    cpu: float = 0.0
    ttft_p99_ms: dict[str, float] = field(default_factory=dict)
    classes: dict[str, Tally] = field(default_factory=dict)


class Traffic:
    """Requests drawn from the mix; the same seed gives the same requests."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def request(self) -> Words:
        priority = self._rng.choices(list(MIX), [mix.share for mix in MIX.values()])[0]
        mix = MIX[priority]
        return priority, self._rng.randint(*mix.prompt), self._rng.randint(*mix.output)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(90) for _ in range(tokens)]

    def pause_s(self, rate: float) -> float:
        return self._rng.expovariate(rate)


class Run:
    """Requests to one cluster, and what became of those that arrived and ended while it was measured."""

    def __init__(self, cluster: NullCluster, args: argparse.Namespace) -> None:
        self._cluster, self._traffic = cluster, Traffic(args.seed)
        self._objectives = scaled(OBJECTIVES, args.scale)
        self._begin = asyncio.get_running_loop().time() + args.warmup
        self._end = self._begin + args.seconds
        self.tallies = {priority: Tally() for priority in PriorityClass}
        self.ttfts: dict[PriorityClass, list[float]] = {priority: [] for priority in PriorityClass}
        self.started = self.ended = 0

    async def open_loop(self, rate: float) -> None:
        """Requests at a rate, until the time is up; then those that are left are cancelled."""
        loop, tasks = asyncio.get_running_loop(), set()
        due = loop.time()
        while True:
            due += self._traffic.pause_s(rate)
            if due >= self._end:
                break
            await asyncio.sleep(max(0.0, due - loop.time()))
            task = loop.create_task(self._one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, self._end - loop.time()))
        await _cancelled(tasks)

    async def closed_loop(self, clients: int) -> None:
        """Each client sends its next request when the last one has ended, until the time is up."""

        async def client() -> None:
            while True:
                await self._one()

        tasks = {asyncio.get_running_loop().create_task(client()) for _ in range(clients)}
        await asyncio.sleep(max(0.0, self._end - asyncio.get_running_loop().time()))
        await _cancelled(tasks)

    def _measured(self, now: float) -> bool:
        return self._begin <= now < self._end

    async def _one(self) -> None:
        loop = asyncio.get_running_loop()
        priority, prompt, output = self._traffic.request()
        tally, objective = self.tallies[priority], self._objectives.of(priority)
        tokens, sent = self._traffic.prompt(prompt), loop.time()
        tally.offered += self._measured(sent)
        self.started += 1
        first = last = count = 0
        try:
            sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
            async for event in self._cluster.client.generate(tokens, sampling, priority=priority.name.lower()):
                if event.token_ids:
                    last = loop.time()
                    first = first or last
                    count += len(event.token_ids)
        except Overloaded:
            tally.shed += self._measured(loop.time())
            self.ended += 1
            return
        self.ended += 1
        if not self._measured(loop.time()):
            return
        ttft_ms = 1000 * (first - sent)
        itl_ms = 1000 * (last - first) / max(1, count - 1)
        late = 0 < objective.ttft_ms < ttft_ms
        slow = 0 < objective.itl_ms < itl_ms
        tally.finished += 1
        tally.late += late
        tally.slow += slow
        tally.good += not late and not slow
        self.ttfts[priority].append(ttft_ms)


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*list(tasks), return_exceptions=True)


def scaled(classes: ClassObjectives, scale: float) -> ClassObjectives:
    """The same, so many times as long."""
    found = [classes.of(priority) for priority in PriorityClass]
    return ClassObjectives(*(ClassObjective(scale * one.ttft_ms, scale * one.itl_ms) for one in found))


def cluster_of(args: argparse.Namespace, model: Path, shedding: bool) -> NullCluster:
    scale = args.scale
    prefill = Costs(scale * args.prefill_base_ms, scale * args.prefill_token_ms, args.prefill_budget)
    decode = Costs(scale * args.decode_base_ms, scale * args.decode_token_ms)
    workers = [CostWorker(f"p{n}", Role.PREFILL, prefill) for n in range(args.prefill)]
    workers += [CostWorker(f"d{n}", Role.DECODE, decode) for n in range(args.decode)]
    return NullCluster(
        model,
        list(workers),
        classes=scaled(OBJECTIVES, scale) if shedding else NONE,
        max_queue=args.max_queue if shedding else ENDLESS,
        max_running_per_worker=args.running,
        queue=QueueConfig(args.policy),
        claim_ttl_s=120.0,
        dead_after_s=60.0,  # a machine that is busy with other work is no dead worker
    )


async def capacity(args: argparse.Namespace, model: Path) -> float:
    """Requests a second that the cluster finishes when there is always more to do."""
    async with cluster_of(args, model, shedding=False) as cluster:
        run = Run(cluster, args)
        await run.closed_loop(args.clients)
        await _settled(cluster)
        return sum(tally.finished for tally in run.tallies.values()) / args.seconds


async def load(args: argparse.Namespace, model: Path, factor: float, rate: float, shedding: bool) -> Load:
    """One load on a fresh cluster."""
    async with cluster_of(args, model, shedding) as cluster:
        run = Run(cluster, args)
        before, began = _cpu_s(), asyncio.get_running_loop().time()
        await run.open_loop(factor * rate)
        cpu = (_cpu_s() - before) / (asyncio.get_running_loop().time() - began)
        await _settled(cluster)
    total: Counter[str] = Counter()
    for tally in run.tallies.values():
        total.update(asdict(tally))
    return Load(
        factor=factor,
        shedding=shedding,
        seconds=args.seconds,
        offered=total["offered"] / args.seconds,
        finished=total["finished"] / args.seconds,
        shed=total["shed"] / args.seconds,
        goodput=total["good"] / args.seconds,
        unfinished=run.started - run.ended,
        cpu=cpu,
        ttft_p99_ms={priority.name.lower(): _p99(times) for priority, times in run.ttfts.items() if times},
        classes={priority.name.lower(): tally for priority, tally in run.tallies.items()},
    )


async def _settled(cluster: NullCluster) -> None:
    """Let go of what was cancelled, if the machine has the time: else the workers' ends are noisy."""
    with suppress(AssertionError):
        await cluster.empty()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def show(rate: float, loads: Sequence[Load]) -> None:
    print(f"capacity: {rate:.2f} requests/s, of simulated workers; requests a second below\n")
    header = f"{'load':>5} {'shedding':>8} {'offered':>8} {'finished':>8} {'shed':>7} {'goodput':>8} {'of peak':>8}"
    print(f"{header} {'cpu':>5}   good / finished, P99 of TTFT: interactive, standard, batch")
    for shedding in (True, False):
        rows = [one for one in loads if one.shedding is shedding]
        peak = max((one.goodput for one in rows), default=0.0) or 1.0
        for one in rows:
            classes = ", ".join(
                f"{tally.good}/{tally.finished} {one.ttft_p99_ms.get(name, 0):.0f} ms"
                for name, tally in one.classes.items()
            )
            print(
                f"{one.factor:5.2f} {'on' if shedding else 'off':>8} {one.offered:8.2f} {one.finished:8.2f} "
                f"{one.shed:7.2f} {one.goodput:8.2f} {one.goodput / peak:8.0%} {one.cpu:5.0%}   {classes}"
            )


async def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder))
        rate = args.rate or await capacity(args, model)
        loads = []
        for factor in args.loads:
            for shedding in (True, False):
                loads.append(await load(args, model, factor, rate, shedding))
    show(rate, loads)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        found = {"simulated_workers": True, "settings": settings, "capacity": rate}
        args.json.write_text(json.dumps(found | {"loads": [asdict(one) for one in loads]}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0], help="times the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="that are measured, of each run")
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds before them")
    parser.add_argument("--clients", type=int, default=64, help="of the run that finds the capacity")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times: costs of the workers and objectives")
    parser.add_argument("--rate", type=float, default=0.0, help="capacity in requests a second, if it is known")
    parser.add_argument("--policy", default="priority", help="of the queue")
    parser.add_argument("--max-queue", type=int, default=256, help="of each class, with shedding")
    parser.add_argument("--prefill", type=int, default=2, help="workers")
    parser.add_argument("--decode", type=int, default=2, help="workers")
    parser.add_argument("--running", type=int, default=32, help="requests on one decode worker at most")
    parser.add_argument("--prefill-base-ms", type=float, default=10.0, help="of a step")
    parser.add_argument("--prefill-token-ms", type=float, default=0.25)
    parser.add_argument("--prefill-budget", type=int, default=256, help="tokens of a step")
    parser.add_argument("--decode-base-ms", type=float, default=20.0)
    parser.add_argument("--decode-token-ms", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
