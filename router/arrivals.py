"""When the last call came: a server that stops while calls come loses those that are on their way."""

from __future__ import annotations

import asyncio


class Arrivals:
    """Of one server's calls, on its event loop."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def note(self) -> None:
        """A call has come."""
        self._last = asyncio.get_running_loop().time()

    async def quiet(self, for_s: float, at_most_s: float) -> None:
        """Until none has come for `for_s` seconds, counted from now on; or until `at_most_s` have passed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            now = loop.time()
            until = min(max(began, self._last) + for_s, began + at_most_s)
            if now >= until:
                return
            await asyncio.sleep(until - now)
