"""An event loop whose time is not the world's: it jumps to the next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Instead of waiting for a timer, sets the loop's time to it."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and no timer is set"
        self.loop.seconds += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also the `Clock` of what runs on it. `seconds`: its time. Close it after use."""

    def __init__(self) -> None:
        selector = _NoWaiting()
        selector.loop = self
        self.seconds = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.seconds

    now = time

    def inside(self, call: Callable[[], T]) -> T:
        """Call a function that needs a running loop. What it schedules is done when time passes."""
        asyncio._set_running_loop(self)
        try:
            return call()
        finally:
            asyncio._set_running_loop(None)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with all that is due meanwhile."""
        self.run_until_complete(asyncio.sleep(seconds))

    def armed(self) -> list[asyncio.TimerHandle]:
        """Timers that have still to fire."""
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
