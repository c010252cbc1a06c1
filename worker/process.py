"""Runs one worker as a process of its own: READY on standard output, SIGTERM drains and ends it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pdcore.config import WorkerConfig
from pdcore.config_json import load_json
from pdcore.errors import PdserveError
from security.secret import with_secret_of


class Worker(Protocol):
    """A worker of any role, as the process and the Ray actor see it."""

    config: WorkerConfig
    incarnation: str
    failed: threading.Event

    @property
    def address(self) -> str: ...

    @property
    def problem(self) -> str:
        """Why `failed` is set."""
        ...

    def start(self) -> None: ...

    def drain(self, timeout_s: float) -> bool: ...

    def stop(self) -> None: ...


def run(arguments: Sequence[str], make_worker: Callable[[WorkerConfig], Worker]) -> int:
    """Entry of ``python -m prefill_worker CONFIG.json`` and ``python -m decode_worker CONFIG.json``.

    Prints one line ``READY {"address", "incarnation", "pid"}`` once requests can come. The cluster's secret is taken
    from the environment if the configuration has none.

    Returns:
        Exit status: 0 after SIGTERM or SIGINT, 1 if the worker failed or could not start, 2 for bad usage.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m prefill_worker|decode_worker CONFIG.json", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asked_to_end = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: asked_to_end.set())
    try:
        config = load_json(WorkerConfig, Path(arguments[0]))
        config = replace(config, security=with_secret_of(config.security, os.environ))
        worker = make_worker(config)
        worker.start()
    except (PdserveError, OSError) as error:
        print(f"cannot start the worker: {error}", file=sys.stderr)
        return 1
    ready = {"address": worker.address, "incarnation": worker.incarnation, "pid": os.getpid()}
    print("READY", json.dumps(ready), flush=True)
    while not asked_to_end.wait(0.1) and not worker.failed.is_set():
        pass
    if not worker.failed.is_set():
        worker.drain(config.drain_timeout_s)
    worker.stop()
    return 1 if worker.failed.is_set() else 0
