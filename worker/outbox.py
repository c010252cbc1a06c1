"""What a worker has to tell one router, merged until the stream can take it."""

from __future__ import annotations

import threading

from pdcore.types import WorkerLoad
from protos import worker_pb2
from protos.convert import load_to_proto


class Outbox:
    """A mailbox with one reader, the session's stream, which takes all that is there at once.

    Tokens of many steps merge into one report when the stream is slower than the engine. The token windows of the
    requests bound what can pile up.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._replies: list[worker_pb2.SessionEvent] = []
        self._report = worker_pb2.Report()
        self._dirty = False
        self._closed = False

    def reply(self, reply: worker_pb2.ReserveReply) -> None:
        with self._condition:
            self._replies.append(worker_pb2.SessionEvent(reserve=reply))
            self._condition.notify()

    def notice(self, notice: worker_pb2.RequestNotice) -> None:
        with self._condition:
            self._report.notices.append(notice)
            self._dirty = True
            self._condition.notify()

    def step(self, tokens: list[worker_pb2.TokenEvent]) -> None:
        """Tokens of one engine step; wakes the stream."""
        with self._condition:
            self._report.tokens.extend(tokens)
            self._dirty = True
            self._condition.notify()

    def close(self) -> None:
        """The stream ends; what has not been taken is dropped, since its router is gone or superseded."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def empty(self) -> bool:
        """The stream has taken everything."""
        with self._condition:
            return not self._dirty and not self._replies

    def wait(self, timeout_s: float) -> bool:
        """Wait for news, at most `timeout_s`; False once the outbox is closed."""
        with self._condition:
            if not self._closed and not self._dirty and not self._replies:
                self._condition.wait(timeout_s)
            return not self._closed

    def take(
        self, load: WorkerLoad, draining: bool, cache: worker_pb2.CacheEvents | None
    ) -> list[worker_pb2.SessionEvent]:
        """All replies, then one report (a heartbeat if there is no news) with load and cache as they are now."""
        with self._condition:
            events, self._replies = self._replies, []
            report, self._report = self._report, worker_pb2.Report()
            self._dirty = False
        report.load.CopyFrom(load_to_proto(load))
        report.draining = draining
        if cache is not None:
            report.cache.CopyFrom(cache)
        events.append(worker_pb2.SessionEvent(report=report))
        return events
