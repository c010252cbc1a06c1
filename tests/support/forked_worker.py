"""Workers forked from a process that has imported everything: ready in a moment, for tests that kill many.

The process that forks has torch and the workers' modules in memory and has started no thread. What runs in the child
is the worker's own `main`, as ``python -m`` would run it.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.forked_worker_imports"])


class ForkedWorker:
    """One worker; as much of `subprocess.Popen` as `WorkerProcess` uses.

    Args:
        module: ``prefill_worker`` or ``decode_worker``. arguments: of its command line.
        log: file that its standard error is appended to.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        read, write = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(module, list(arguments), str(log), write), daemon=True)
        self._process.start()
        write.close()
        self.stdout: TextIO = os.fdopen(os.dup(read.fileno()))
        read.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(module: str, arguments: list[str], log: str, stdout: Connection) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: the forking process ends with the tests, and this one with it
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 2)
    os.dup2(stdout.fileno(), 1)
    os.close(descriptor)
    stdout.close()
    sys.argv = [module, *arguments]
    status = importlib.import_module(f"{module}.__main__").main()
    sys.stdout.flush()
    os._exit(status)
