"""Writing to many streams without keeping the workers' news waiting."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 32
"""Streams that begin a write in one pass of the event loop: some milliseconds of work."""


class Turns:
    """Lets at most `at_once` streams have a turn in one pass of the event loop, first come first served.

    A pass takes what has come on each connection once, a worker's report among it. Without a bound a busy router
    would write to every stream for each report that it reads, and reports would pile up unread where nobody sees
    them. So the reports are read, and a stream that waits for its turn finds more tokens when it comes: the busier,
    the more. While there are fewer writes than turns nobody waits.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def turn(self) -> None:
        """Until the caller may go on."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_pass)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next_pass(self) -> None:
        self._left = self._at_once
        while self._left > 0 and self._waiting:
            next_one = self._waiting.popleft()
            if not next_one.done():  # it would be if its call was cancelled
                next_one.set_result(None)
                self._left -= 1
        self._counting = self._left < self._at_once
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_pass)
