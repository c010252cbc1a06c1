"""How busy the event loop's thread is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from router.pacing import next_interval

_SCHEDSTAT = "/proc/thread-self/schedstat"
LOOK_EVERY_S = 0.05


def wanted_s() -> float:
    """Seconds for which the calling thread has run, or has waited for a processor if the system says that too."""
    try:
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
        try:
            ran, waited = os.read(file, 100).split()[:2]
        finally:
            os.close(file)
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):  # another system, or one without these statistics
        return time.thread_time()


class Pacer:
    """Looks now and then how busy the calling thread is, and keeps the interval of `router.pacing`.

    Args:
        wanted_s: see there. Only its differences count.
    """

    def __init__(self, now: float, wanted_s: Callable[[], float] = wanted_s) -> None:
        self.interval_s = 0.0
        self._wanted_s = wanted_s
        self._looked_at = now
        self._wanted_then = wanted_s()

    def look(self, now: float) -> float:
        """The interval at present, in seconds. `now`: on the clock, in seconds."""
        elapsed = now - self._looked_at
        if elapsed >= LOOK_EVERY_S:
            wanted = self._wanted_s()
            self.interval_s = next_interval(self.interval_s, (wanted - self._wanted_then) / elapsed)
            self._looked_at, self._wanted_then = now, wanted
        return self.interval_s
