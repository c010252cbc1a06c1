"""SIGTERM and SIGINT as something to wait for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine


class Signals:
    """Counts SIGTERM and SIGINT on the running event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._more = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_next: Callable[[], None] | None = None
        self.listen()

    def listen(self) -> None:
        """Take both signals; again if somebody else has taken them since."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signalled)

    def on_next(self, act: Callable[[], None]) -> None:
        """Call `act` on the event loop as soon as one more signal comes, whatever else goes on there."""
        self._on_next = act

    def _signalled(self) -> None:
        self._count += 1
        if self._on_next is not None:
            self._on_next()
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def wait(self, count: int) -> None:
        """Until that many signals have come."""
        async with self._more:
            await self._more.wait_for(lambda: self._count >= count)

    async def unless(
        self, work: Coroutine[object, object, object], *, count: int, told: Callable[[], None] = lambda: None
    ) -> bool:
        """Run `work`; cancel it once that many signals have come. True if it was completed.

        `told` is called before it is cancelled: that may take a while.
        """
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self.wait(count))
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if working.done():
            working.result()
            return True
        told()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return False
