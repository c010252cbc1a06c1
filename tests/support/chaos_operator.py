"""Who does to a cluster what a chaos plan says, starts again what has died, and watches what its processes take."""

from __future__ import annotations

import heapq
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdcore.types import Role
from tests.support.chaos_plan import Disturbance, Verb
from tests.support.local_cluster import LocalCluster
from tests.support.processes import WorkerProcess

_POLL_S = 0.02
_MEASURE_S = 0.5
_SETTLED_S = 10.0  # after a process is ready: then it has done most things once
_AFTERMATH_S = 15.0  # after a decode worker was disturbed the router may be without one as long, on a busy machine
_MARGIN_S = 0.25  # between a refusal and the router's word of it


@dataclass(frozen=True, slots=True)
class Size:
    """What a process takes at a moment. `rings`: of shared memory for KV that it has mapped."""

    at: float
    rss: int
    threads: int
    files: int
    rings: int


@dataclass(slots=True)
class ProcessLife:
    """One process: `name`, and its sizes from when it was ready to its end."""

    name: str
    pid: int
    ready_at: float
    sizes: list[Size] = field(default_factory=list)

    @property
    def settled(self) -> Size | None:
        """Its size when it had settled; None if it did not live as long."""
        return next((size for size in self.sizes if size.at >= self.ready_at + _SETTLED_S), None)


def size_of(pid: int) -> Size | None:
    """None if the process is gone."""
    try:
        process = psutil.Process(pid)
        maps = Path(f"/proc/{pid}/maps").read_text()
        rings = maps.count("/memfd:pdserve-kv")
        return Size(time.monotonic(), process.memory_info().rss, process.num_threads(), process.num_fds(), rings)
    except (psutil.Error, OSError):
        return None


class Operator:
    """Carries out disturbances in a thread of its own, and keeps every worker running between them.

    Args:
        gate: the file that lets KV messages meet with faults while it exists.

    Attributes:
        restarts: of workers, by why. lives: of processes. problems: what should not have happened.
    """

    def __init__(self, cluster: LocalCluster, gate: Path) -> None:
        self._cluster = cluster
        self._gate = gate
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._busy: set[str] = set()  # workers that are down, or may be, by our doing
        self._starting: dict[str, threading.Thread] = {}
        self._frozen: set[str] = set()
        self._end = threading.Event()
        self._measured_at = 0.0
        self._decode = {worker.config.worker_id for worker in cluster.of_role(Role.DECODE)}
        self._disturbed: list[float] = []  # when something was done to a decode worker, or was over
        self._silences: list[list[float]] = []  # of the router: from, to
        self._channel = grpc.insecure_channel(cluster.address)
        self.restarts: dict[str, int] = {}
        self.problems: list[str] = []
        self.lives = [ProcessLife("router and clients", psutil.Process().pid, time.monotonic())]
        for worker in cluster.workers.values():
            self._is_ready(worker)
        self._thread = threading.Thread(target=self._run, name="chaos-operator", daemon=True)
        self._thread.start()
        self._health = threading.Thread(target=self._watch_health, name="chaos-health", daemon=True)
        self._health.start()

    def disturb(self, disturbances: tuple[Disturbance, ...]) -> None:
        """Do all of these, their times counted from now."""
        now = time.monotonic()
        for each in disturbances:
            self._at(now + each.at_s, lambda each=each: self._do(each))  # type: ignore[misc]

    def calm(self, timeout_s: float = 60.0) -> None:
        """Returns when every disturbance is over and every worker runs; AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._acts or self._busy or not all(worker.running for worker in self._cluster.workers.values()):
            assert time.monotonic() < deadline, f"workers do not come back: {self._busy}, {self.problems}"
            assert self._thread.is_alive(), "the operator has died"
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the thread. What is frozen goes on, so that it can be stopped."""
        self._end.set()
        self._thread.join(10.0)
        self._channel.close()
        self._health.join(10.0)
        for starting in self._starting.values():
            starting.join(60.0)
        for worker_id in self._frozen:
            self._cluster.workers[worker_id].signal(signal.SIGCONT)

    def measure(self) -> None:
        """Look at the sizes of all processes that live."""
        for life in self.lives:
            if life.pid > 0 and (size := size_of(life.pid)) is not None:
                life.sizes.append(size)

    def alive(self) -> list[ProcessLife]:
        """The processes that live."""
        pids = {worker.pid for worker in self._cluster.workers.values() if worker.running} | {self.lives[0].pid}
        return [life for life in self.lives if life.pid in pids]

    # -- the thread --------------------------------------------------------------------------------------------

    def _at(self, when: float, act: Callable[[], None]) -> None:
        with self._lock:
            heapq.heappush(self._acts, (when, next(self._order), act))

    def _due(self, now: float) -> Callable[[], None] | None:
        with self._lock:
            return heapq.heappop(self._acts)[2] if self._acts and self._acts[0][0] <= now else None

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            now = time.monotonic()
            while (act := self._due(now)) is not None:
                act()
            for worker in self._cluster.workers.values():
                if worker.config.worker_id not in self._busy and not worker.running:
                    # Whatever made it end, an operator's supervisor starts it again; but nothing should have.
                    self.problems.append(f"{worker.config.worker_id} ended by itself, see {worker.log}")
                    self._start(worker, "ended by itself")
            if now - self._measured_at >= _MEASURE_S:
                self._measured_at = now
                living = self.alive()
                for life in living:
                    if (size := size_of(life.pid)) is not None:
                        life.sizes.append(size)

    def _watch_health(self) -> None:
        """Follow what the router says of itself: it serves while it has a worker that can run a request."""
        watch = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest())
        try:
            for reply in watch:
                now = time.monotonic()
                if reply.status != health_pb2.HealthCheckResponse.SERVING:
                    self._silences.append([now - _MARGIN_S, math.inf])
                elif self._silences:
                    self._silences[-1][1] = min(self._silences[-1][1], now + _MARGIN_S)
        except (grpc.RpcError, ValueError):
            pass  # the channel is closed: this run is over

    @property
    def outages(self) -> list[tuple[float, float]]:
        """From and to, on the monotonic clock: when the router did not serve, for what was done to decode workers."""
        return [
            (start, stop)
            for start, stop in self._silences
            if any(start - _AFTERMATH_S < at < stop for at in self._disturbed)
        ]

    def _note_disturbed(self, worker_id: str) -> None:
        if worker_id in self._decode:
            self._disturbed.append(time.monotonic())

    def _do(self, what: Disturbance) -> None:
        now = time.monotonic()
        if what.verb is Verb.MESSAGES:
            self._gate.touch()
            self._at(now + what.seconds, lambda: self._gate.unlink(missing_ok=True))
            return
        worker = self._cluster.workers[what.worker]
        if what.worker in self._busy or not worker.running:
            return  # it takes longer to come back than was planned
        self._busy.add(what.worker)
        self._note_disturbed(what.worker)
        if what.verb is Verb.KILL:
            worker.kill()
            self._at(now + what.seconds, lambda: self._start(worker, "killed"))
        elif what.verb is Verb.FREEZE:
            worker.signal(signal.SIGSTOP)
            self._frozen.add(what.worker)
            self._at(now + what.seconds, lambda: self._thaw(worker))
        else:
            worker.signal(signal.SIGTERM)
            self._at(now, lambda: self._start_when_ended(worker))

    def _thaw(self, worker: WorkerProcess) -> None:
        worker.signal(signal.SIGCONT)
        self._frozen.discard(worker.config.worker_id)
        self._busy.discard(worker.config.worker_id)
        self._note_disturbed(worker.config.worker_id)

    def _start_when_ended(self, worker: WorkerProcess) -> None:
        if worker.running:
            self._at(time.monotonic() + _POLL_S, lambda: self._start_when_ended(worker))
        else:
            self._start(worker, "restarted")

    def _start(self, worker: WorkerProcess, why: str) -> None:
        """Under the same id; a new incarnation."""
        worker_id = worker.config.worker_id
        self._busy.add(worker_id)
        self.restarts[why] = self.restarts.get(why, 0) + 1
        worker.stop()
        worker.begin()

        def wait() -> None:
            try:
                worker.wait_ready()
                self._is_ready(worker)
            except AssertionError as error:
                self.problems.append(str(error))
            self._busy.discard(worker_id)
            self._note_disturbed(worker_id)

        self._starting[worker_id] = threading.Thread(target=wait, name=f"chaos-start {worker_id}", daemon=True)
        self._starting[worker_id].start()

    def _is_ready(self, worker: WorkerProcess) -> None:
        self.lives.append(ProcessLife(worker.config.worker_id, worker.pid, time.monotonic()))
