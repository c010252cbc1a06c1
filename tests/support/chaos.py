"""A chaos run: a cluster of real processes under load, disturbed as a plan says, and what must hold at its end.

::

    start the cluster -> every case once, undisturbed: what is expected -> sizes
      -> load and disturbances together -> all calm, all workers up
      -> blocks back at the baseline, every case once more -> sizes, logs -> report

See docs/chaos.md.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from pdcore.classes import ClassObjective, ClassObjectives
from pdcore.config import SchedulerConfig, TransferConfig, WorkerConfig
from pdcore.config_json import to_json
from pdcore.types import Role
from protos import admin_pb2, admin_pb2_grpc
from router.client import AsyncClient
from tests.support.chaos_load import Judge, Sample, Seen, run_request
from tests.support.chaos_operator import Operator, ProcessLife
from tests.support.chaos_plan import Manner, Plan, Request
from tests.support.faulty_link import MessageFaults
from tests.support.local_cluster import LocalCluster, LoopThread
from tests.support.processes import worker_config
from tests.support.reference import load_reference

REQUEST_LIMIT_S = 90.0
LEASE_S = 3.0
DEAD_AFTER_S = 2.5
GROWTH_BYTES = 128 << 20
GROWTH_HANDLES = 48
SLOW_READ_AHEAD = 512
MAX_REPLAYS = 100
"""More than a run can cause, so that no request may fail for it."""

_BAD_LINES = re.compile(r"Traceback \(most recent call last\)|never retrieved|was never awaited|Task was destroyed")


@dataclass(slots=True)
class Report:
    """What came of a run. `problems` is empty if all is well; each tells what, and where to look.

    `memory`: resident MiB of each process that lived to the end, every five seconds.
    """

    plan: Plan
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_manner: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    near_ties: int = 0
    tokens: int = 0
    tokens_per_s: list[int] = field(default_factory=list)
    worst_gap_s: float = 0.0
    replays: int = 0
    failed_transfers: int = 0
    rebuilds: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    disturbances: Counter[str] = field(default_factory=Counter)
    message_faults: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, str] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"chaos: {sum(self.outcomes.values())} requests in {self.seconds:.0f} s: {dict(self.outcomes)}",
            f"disturbances {dict(self.disturbances)}, message faults {dict(self.message_faults)}, "
            f"restarts {self.restarts}",
            f"replays {self.replays}, failed transfers {self.failed_transfers}, rebuilds {self.rebuilds}, "
            f"near-ties {self.near_ties}, tokens {self.tokens}, worst gap {self.worst_gap_s:.1f} s",
        ]
        if self.problems:
            lines += [str(self.plan), f"{len(self.problems)} problems:", *(f"- {each}" for each in self.problems)]
        return "\n".join(lines)


class _RouterLog(logging.Handler):
    """The log of the router and of everything else in this process, in a file; counts admissions and ends."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.path = path
        self.admitted: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._file = path.open("w")
        self._level = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record) + "\n")
        if record.name != "router.requests" or not isinstance(record.args, tuple):
            return
        request_id = str(getattr(record, "request_id", "")).partition("#")[0]
        if record.args[0] == "request admitted":
            self.admitted[request_id] += int(getattr(record, "samples", 1))
        elif record.args[0] == "request ended":
            self.ended[request_id] += 1

    def __enter__(self) -> _RouterLog:
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        root.setLevel(self._level)
        self._file.close()

    def text(self) -> str:
        self._file.flush()
        return self.path.read_text()


def chaos_configs(model: Path, prefill: int = 2, decode: int = 3) -> list[WorkerConfig]:
    """The workers of a chaos run. One prefill worker sends over gRPC alone, the others as they like; one decode
    worker swaps, the others recompute; all are small enough to run out of blocks."""
    scheduler = SchedulerConfig(max_num_batched_tokens=128, prefill_chunk_tokens=64, max_num_seqs=16)
    transfer = TransferConfig(lease_s=LEASE_S, frame_tokens=64, frame_bytes=16384, send_timeout_s=1.5)
    configs = []
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for index in range(count):
            ways = replace(transfer, transport="grpc") if role is Role.PREFILL and index == 0 else transfer
            config = worker_config(model, role, index, num_blocks=192, scheduler=scheduler, transfer=ways)
            if role is Role.DECODE and index == 0:
                config = replace(config, engine=replace(config.engine, swap_memory=8 << 20))
            configs.append(replace(config, heartbeat_s=0.25, dead_after_s=DEAD_AFTER_S, drain_timeout_s=3.0))
    return configs


def message_faults(seed: int, folder: Path) -> MessageFaults:
    """What befalls KV messages while the gate is open."""
    return MessageFaults(
        seed=seed,
        drop=0.01,
        delay=0.05,
        repeat=0.01,
        damage=0.02,
        reset=0.004,
        max_delay_s=0.3,
        while_file=str(folder / "message-faults"),
        log_file=str(folder / "message-faults.log"),
    )


class ChaosRun:
    """One run; see the module.

    Args:
        model: folder of a checkpoint. folder: for logs and configurations.
        progress: is told how it goes, now and then.
        limit_s: how long a request may take, whatever happens.
    """

    def __init__(
        self,
        plan: Plan,
        model: Path,
        folder: Path,
        progress: Callable[[str], None] = lambda line: None,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> None:
        self._plan = plan
        self._limit_s = limit_s
        self._model_path = model
        self._folder = folder
        self._progress = progress
        self._configs = chaos_configs(model)
        self.report = Report(plan, disturbances=Counter(each.verb.value for each in plan.disturbances))
        self._seen: dict[str, Seen] = {}
        self._arrivals: Counter[int] = Counter()  # tokens by second

    def run(self) -> Report:
        """Everything. Raises AssertionError only if the cluster does not come to rest."""
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        for config in self._configs:
            faults = message_faults(self._plan.seed, folder)
            (folder / f"{config.worker_id}.faults.json").write_text(to_json(faults))
        loop = LoopThread()
        with _RouterLog(folder / "router.log") as log:
            try:
                with self._cluster() as cluster:
                    self._run_on(cluster, loop, log)
            finally:
                loop.close()
            gc.collect()  # a future that nobody read is told of when it goes
            self._read_logs(log)
        return self.report

    def _cluster(self) -> LocalCluster:
        return LocalCluster(
            self._model_path,
            self._folder,
            self._configs,
            forked=True,
            modules={Role.PREFILL: "tests.support.faulty_prefill"},
            max_replays=MAX_REPLAYS,
            max_queue=100_000,
            # Nothing is given up for coming late.
            classes=ClassObjectives(interactive=ClassObjective(itl_ms=200.0), standard=ClassObjective()),
            token_window=16,
            worker_wait_s=self._limit_s,
            heartbeat_s=0.25,
            dead_after_s=DEAD_AFTER_S,
        )

    def _run_on(self, cluster: LocalCluster, loop: LoopThread, log: _RouterLog) -> None:
        report = self.report
        operator = Operator(cluster, self._folder / "message-faults")
        try:
            expected = self._undisturbed(cluster, loop, "before", log)
            self._progress(f"{len(expected)} cases computed undisturbed")
            time.sleep(1.0)
            operator.measure()
            began = time.monotonic()
            operator.disturb(self._plan.disturbances)
            loop.run(self._load(cluster.address), self._plan.seconds + self._limit_s + 30.0)
            report.seconds = time.monotonic() - began
            operator.calm()
            self._progress("calm")
            self._judge(Judge(expected, load_reference(self._model_path), operator.outages))
            cluster.wait_connected(60.0)
            self._counters(cluster.address)
            self._check_rest(cluster)
            again = self._undisturbed(cluster, loop, "after", log)
            for name, samples in again.items():
                if [sample.tokens for sample in samples] != [sample.tokens for sample in expected[name]]:
                    report.problems.append(f"{name} comes out differently after the chaos")
            self._check_rest(cluster)
            self._check_counts(log)
            operator.measure()
            self._check_sizes(operator)
        finally:
            report.restarts = dict(operator.restarts)
            report.problems += operator.problems
            operator.close()

    # -- load --------------------------------------------------------------------------------------------------

    def _undisturbed(
        self, cluster: LocalCluster, loop: LoopThread, when: str, log: _RouterLog
    ) -> dict[str, Sequence[Sample]]:
        """Every case once, by a client that reads; none may fail."""
        requests = [
            Request(f"{when}-{case.name}", 0.0, case, Manner.READS, 0.0, "standard", f"{when}-{case.name}")
            for case in self._plan.cases
        ]

        async def run() -> list[Seen]:
            places = asyncio.Semaphore(6)

            async def one(client: AsyncClient, request: Request) -> Seen:
                async with places:
                    return await run_request(client, request, self._limit_s)

            async with AsyncClient(cluster.address) as client:
                return await asyncio.gather(*(one(client, request) for request in requests))

        found: dict[str, Sequence[Sample]] = {}
        for request, seen in zip(requests, loop.run(run(), 2 * self._limit_s), strict=True):
            assert seen.error is None, f"undisturbed, {request} failed: {seen.error!r}"
            assert seen.ended, f"undisturbed, {request} has no end"
            assert not seen.broken, f"undisturbed, {request}: {seen.broken}"
            found[request.case.name] = seen.samples
        return found

    async def _load(self, address: str) -> None:
        """Every request of the plan, at its time."""
        began = time.monotonic()

        def heard(tokens: int) -> None:
            self._arrivals[int(time.monotonic() - began)] += tokens

        async def one(client: AsyncClient, request: Request) -> None:
            await asyncio.sleep(max(0.0, began + request.at_s - time.monotonic()))
            self._seen[request.request_id] = await run_request(client, request, self._limit_s, heard)

        async def tell() -> None:
            while True:
                await asyncio.sleep(10.0)
                elapsed, done = time.monotonic() - began, len(self._seen)
                bad = Counter(seen.outcome for seen in self._seen.values())
                self._progress(f"{elapsed:5.0f} s: {done} of {len(self._plan.requests)} requests ended {dict(bad)}")

        async with AsyncClient(address) as plain, AsyncClient(address, read_ahead_bytes=SLOW_READ_AHEAD) as slow:
            telling = asyncio.create_task(tell())
            try:
                await asyncio.gather(
                    *(
                        one(slow if request.manner is Manner.READS_SLOWLY else plain, request)
                        for request in self._plan.requests
                    )
                )
            finally:
                telling.cancel()

    # -- what must hold ----------------------------------------------------------------------------------------

    def _judge(self, judge: Judge) -> None:
        report = self.report
        for request in self._plan.requests:
            seen = self._seen[request.request_id]
            verdict = judge.judge(request, seen)
            report.near_ties += verdict.near_ties
            report.problems += [f"{request}: {problem}" for problem in verdict.problems]
            report.outcomes[seen.outcome] += 1
            report.by_manner.setdefault(request.manner.value, Counter())[seen.outcome] += 1
            report.tokens += seen.tokens
            if request.manner is not Manner.READS_SLOWLY:
                report.worst_gap_s = max(report.worst_gap_s, seen.worst_gap_s)
        report.tokens_per_s = [self._arrivals[second] for second in range(int(report.seconds) + 1)]

    def _counters(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            status = admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=30.0)
        report = self.report
        report.replays, report.rebuilds = status.replays, status.rebuilds
        report.failed_transfers = status.failed_transfers
        if status.queued_requests or status.running_requests:
            report.problems.append(
                f"the router still has {status.queued_requests} requests queued and {status.running_requests} running"
            )
        log = self._folder / "message-faults.log"
        if log.exists():
            report.message_faults.update(line.split()[0] for line in log.read_text().splitlines())

    def _check_rest(self, cluster: LocalCluster) -> None:
        try:
            cluster.assert_baseline(LEASE_S + 5.0)
        except AssertionError as error:
            self.report.problems.append(f"not at rest: {error}")

    def _check_counts(self, log: _RouterLog) -> None:
        """In the router's own log each sample that was admitted has ended exactly once."""
        if log.admitted != log.ended:
            differing = {
                name: (log.admitted[name], log.ended[name])
                for name in log.admitted | log.ended
                if log.admitted[name] != log.ended[name]
            }
            self.report.problems.append(f"samples (admitted, ended) by request: {differing}")

    def _check_sizes(self, operator: Operator) -> None:
        senders = sum(config.role is Role.PREFILL for config in self._configs)
        for life in operator.alive():
            self._check_size(life, senders)

    def _check_size(self, life: ProcessLife, senders: int) -> None:
        settled, last = life.settled, life.sizes[-1] if life.sizes else None
        if settled is None or last is None:
            return  # it has not lived long enough
        self.report.sizes[f"{life.name} {life.pid}"] = (
            f"{settled.rss >> 20} -> {last.rss >> 20} MiB, {settled.threads} -> {last.threads} threads, "
            f"{settled.files} -> {last.files} files, {last.rings} rings"
        )
        self.report.memory[f"{life.name} {life.pid}"] = [size.rss >> 20 for size in life.sizes[::10]]
        grown = {
            "bytes of memory": (settled.rss, last.rss, GROWTH_BYTES),
            "threads": (settled.threads, last.threads, GROWTH_HANDLES),
            "open files": (settled.files, last.files, GROWTH_HANDLES),
            "mapped rings": (0, last.rings, max(senders, len(self._configs) - senders)),
        }
        for what, (before, after, bound) in grown.items():
            if after - before > bound:
                self.report.problems.append(f"{life.name} ({life.pid}) has {after} {what}, {before} when it settled")

    def _read_logs(self, log: _RouterLog) -> None:
        texts = {log.path: log.text()}
        for path in sorted(self._folder.glob("*-[0-9].log")):
            texts[path] = path.read_text()
        for path, text in texts.items():
            for match in list(_BAD_LINES.finditer(text))[:3]:
                excerpt = text[max(0, match.start() - 300) : match.end() + 1500]
                self.report.problems.append(f"in {path}:\n{excerpt}")
