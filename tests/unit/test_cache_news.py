"""What a router hears of a worker's prefix cache is what is in it, however far behind the session's stream is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.prefix_cache import CacheEvent, CacheEventLog, CacheEvents
from protos import worker_pb2
from worker import cache_news
from worker.cache_news import CacheFollower


class Source:
    """A cache of single blocks whose log is short."""

    def __init__(self) -> None:
        self.log = CacheEventLog(6)
        self.names: dict[bytes, None] = {}

    def flip(self, number: int) -> None:
        name = bytes([number]) * 16
        added = name not in self.names
        if added:
            self.names[name] = None
        else:
            del self.names[name]
        self.log.append(CacheEvent(added, name))

    def cache_events(self, since: int) -> CacheEvents:
        return self.log.since(since)

    def cached_names(self) -> tuple[list[bytes], int]:
        return list(self.names), self.log.next


class Listener:
    """Applies messages as worker.proto says."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.next = 0

    def hear(self, message: worker_pb2.CacheEvents | None) -> None:
        if message is None:
            return
        assert message.first == self.next
        if message.reset:
            self.known.clear()
        names = [message.names[at : at + 16] for at in range(0, len(message.names), 16)]
        assert sum(map(abs, message.runs)) == len(names)
        self.next += len(names)
        for run in message.runs:
            for name in names[: abs(run)]:
                assert (name in self.known) == (run < 0), "nothing comes twice, and nothing leaves that was not there"
                (self.known.add if run > 0 else self.known.remove)(name)
            del names[: abs(run)]


# Blocks that come or go; None: the stream takes a report.
@given(st.lists(st.sampled_from([None, *range(10)]), max_size=120), st.integers(1, 9))
def test_a_follower_knows_what_is_there(happenings: list[int | None], at_once: int) -> None:
    source, listener = Source(), Listener()
    for number in range(3):
        source.flip(number)  # before anybody listens
    follower = CacheFollower(source)
    most, cache_news.EVENTS_AT_ONCE = cache_news.EVENTS_AT_ONCE, at_once
    try:
        for number in happenings:
            if number is None:
                listener.hear(follower.take())
            else:
                source.flip(number)
        for _ in range(200):
            listener.hear(message := follower.take())
            if message is None:
                break
        assert listener.known == set(source.names)
    finally:
        cache_news.EVENTS_AT_ONCE = most


def test_who_falls_behind_hears_all_that_is_there_anew() -> None:
    source, listener = Source(), Listener()
    follower = CacheFollower(source)
    source.flip(1)
    listener.hear(follower.take())
    for number in (1, 2, 3, 4, 5, 6, 7, 8):  # the log has room for six
        source.flip(number)
    message = follower.take()
    assert message is not None
    assert message.reset
    listener.hear(message)
    assert listener.known == set(source.names)


def test_without_news_there_is_no_message_and_an_empty_cache_is_told_once() -> None:
    follower = CacheFollower(Source())
    first = follower.take()
    assert first is not None
    assert (first.reset, first.names) == (True, b"")
    assert follower.take() is None
