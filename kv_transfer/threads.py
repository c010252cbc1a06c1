"""Threads of the transfer: where they run, and what becomes known when one dies."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from pdcore.errors import ConfigError
from pdcore.tracebacks import wordless

logger = logging.getLogger(__name__)


def check_cores(key: str, cores: tuple[int, ...]) -> None:
    """Raises `ConfigError` if the calling thread may not run on one of these cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if not set(cores) <= set(allowed):
        raise ConfigError(key, cores, f"cores of {allowed}")


def pin_thread(cores: tuple[int, ...]) -> None:
    """Keep the calling thread on `cores`; empty leaves it free."""
    if cores:
        os.sched_setaffinity(0, cores)


class CrashGuard:
    """Runs the loops of threads that stand for one thing: without any of them it no longer works.

    Args:
        on_crash: called with the first exception that ends a loop, from that loop's thread, once over all of them;
            every one is logged. It must neither block nor wait for that thread. None: logged only.
    """

    def __init__(self, on_crash: Callable[[BaseException], None] | None) -> None:
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._crashed = False

    def run(self, loop: Callable[[], None]) -> None:
        """Run `loop` until it returns or raises."""
        try:
            loop()
        except BaseException as error:
            logger.exception("thread %s died", threading.current_thread().name, exc_info=wordless(error))
            with self._lock:
                first, self._crashed = not self._crashed, True
            if first and self._on_crash is not None:
                self._on_crash(error)
