"""What one router has still to hear of this worker's prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

from engine.prefix_cache import CacheEvent, CacheEvents
from protos import worker_pb2

EVENTS_AT_ONCE = 32_768
"""Events in one report at most: half a megabyte."""


class CacheSource(Protocol):
    """An engine, as far as its prefix cache is followed. Thread-safe."""

    def cache_events(self, since: int) -> CacheEvents: ...

    def cached_names(self) -> tuple[list[bytes], int]: ...


class CacheFollower:
    """Follows the cache for one session, report by report, and begins anew if it has fallen too far behind.

    Used by the session's stream alone.
    """

    def __init__(self, source: CacheSource) -> None:
        self._source = source
        self._next: int | None = None  # event of the source; None before the first look
        self._told = 0  # events told, over the session
        self._waiting: deque[CacheEvent] = deque()

    def take(self) -> worker_pb2.CacheEvents | None:
        """The next events; None if there is nothing new."""
        reset = self._look()
        if not reset and not self._waiting:
            return None
        now = [self._waiting.popleft() for _ in range(min(len(self._waiting), EVENTS_AT_ONCE))]
        message = worker_pb2.CacheEvents(
            first=self._told, reset=reset, names=b"".join(event.block_hash for event in now), runs=_runs(now)
        )
        self._told += len(now)
        return message

    def _look(self) -> bool:
        """Take up what is new; True if what was told before is of no use any more."""
        if self._next is not None and self._waiting:
            return False  # the rest first: meanwhile the source keeps what follows, or there is a new beginning
        if self._next is not None:
            first, events, gap = self._source.cache_events(self._next)
            if not gap:
                self._next = first + len(events)
                self._waiting.extend(events)
                return False
        names, self._next = self._source.cached_names()
        self._waiting = deque(CacheEvent(True, name) for name in names)
        return True


def _runs(events: Iterable[CacheEvent]) -> list[int]:
    """See `CacheEvents` in worker.proto."""
    runs = ((added, sum(1 for _ in group)) for added, group in groupby(events, key=lambda event: event.added))
    return [count if added else -count for added, count in runs]
