"""The threads in which texts become tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SHORT_CHARS = 8192
"""Texts of up to so many characters are short: about 2,000 tokens, a few milliseconds."""

SHORT_THREADS, LONG_THREADS = 1, 2

T = TypeVar("T")


class TextThreads:
    """Runs work on texts off the event loop, in two lanes, each in the order in which it came.

    Short texts have a thread of their own, so that they never wait for a long one. Long ones share two, however many
    come at once. Tokenisers give up the interpreter lock as they work, so the event loop goes on meanwhile.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="text-short")
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="text-long")

    async def run(self, chars: int, work: Callable[[], T]) -> T:
        """`work` on a text of about so many characters; what it returns or raises."""
        lane = self._short if chars <= SHORT_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Stop the threads; what is queued there is dropped."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
