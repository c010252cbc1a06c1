"""Worker processes for tests: started, watched, killed, and never left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from pdcore.config import EngineConfig, SchedulerConfig, TransferConfig, WorkerConfig
from pdcore.config_json import to_json
from pdcore.faults import FaultPlan
from pdcore.types import Role
from tests.support.forked_worker import ForkedWorker

REPOSITORY = Path(__file__).resolve().parents[2]
_MODULE = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker", Role.AGGREGATED: "decode_worker"}


def worker_config(
    model: Path,
    role: Role,
    index: int = 0,
    *,
    controller: str = "",
    block_size: int = 16,
    num_blocks: int = 256,
    dtype: str = "float32",
    faults: tuple[FaultPlan, ...] = (),
    scheduler: SchedulerConfig | None = None,
    transfer: TransferConfig | None = None,
    served_name: str = "tiny",
    prefix_cache: bool = True,
) -> WorkerConfig:
    """A worker of the test cluster: one thread, small pool, quick to notice silence."""
    return WorkerConfig(
        worker_id=f"{role.value}-{index}",
        role=role,
        engine=EngineConfig(
            model_path=str(model),
            served_name=served_name,
            dtype=dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            threads=1,
            prefix_cache=prefix_cache,
            scheduler=scheduler or SchedulerConfig(),
        ),
        transfer=transfer or TransferConfig(),
        controller=controller,
        faults=faults,
    )


# A test process that is killed must not leave workers behind: the kernel sees to it (PR_SET_PDEATHSIG). The child
# asks for it itself: code between fork and exec is not safe in a process with gRPC's threads.
RUN_MODULE = (
    "import ctypes, runpy, sys; ctypes.CDLL(None).prctl(1, 9); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class WorkerProcess:
    """One ``python -m prefill_worker|decode_worker`` process.

    Args:
        folder: where its configuration and its log go.
        forked: start it from a process that has imported everything; see `forked_worker`.
        module: run this one instead of the role's.
    """

    def __init__(self, config: WorkerConfig, folder: Path, forked: bool = False, module: str = "") -> None:
        self.config = config
        self._module = module or _MODULE[config.role]
        self._folder = folder
        self._forked = forked
        self._process: subprocess.Popen[str] | ForkedWorker | None = None
        self.address = ""
        self.incarnation = ""
        self.log = folder / f"{config.worker_id}.log"

    def start(self, timeout_s: float = 120.0) -> WorkerProcess:
        """Start and wait for READY; raises with the end of the log if it does not come."""
        self.begin()
        self.wait_ready(timeout_s)
        return self

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.config.worker_id}.json"
        path.write_text(to_json(self.config))
        if self._forked:
            self._process = ForkedWorker(self._module, [str(path)], self.log)
            return
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUN_MODULE, self._module, str(path)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
            )

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        bound = threading.Timer(timeout_s, self._process.kill)
        bound.start()
        line = self._process.stdout.readline()
        bound.cancel()
        if not line.startswith("READY "):
            self.stop()
            raise AssertionError(f"{self.config.worker_id} did not start:\n{self.log.read_text()[-3000:]}")
        ready = json.loads(line.removeprefix("READY "))
        self.address, self.incarnation = ready["address"], ready["incarnation"]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(10.0)

    def wait(self, timeout_s: float) -> int:
        """Exit status; raises if the process is still there after `timeout_s`."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """End it whatever its state."""
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


def eventually(condition, timeout_s: float, what: str, interval_s: float = 0.02):  # type: ignore[no-untyped-def]
    """Wait until `condition()` is true and return it; fail naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(interval_s)
