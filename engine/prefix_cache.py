"""Which blocks hold KV that later requests may share, found by what it was computed from. Pure.

Blocks are numbers here and names are those of `pdcore.hashing`. Who else uses a block is the block manager's
business; it passes its reference counts in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

EVENTS_KEPT = 8192
"""Events that are kept for followers; older ones are forgotten."""


class CacheEvent(NamedTuple):
    """The block of this name can be found in the cache from now on (`added`), or no longer."""

    added: bool
    block_hash: bytes


class CacheEvents(NamedTuple):
    """Events with the numbers ``first``, ``first + 1``, ... in the order in which they happened.

    `gap`: events before `first` that were asked for are forgotten. Whoever follows the cache then looks at its names.
    """

    first: int
    events: tuple[CacheEvent, ...]
    gap: bool


class CacheEventLog:
    """The latest `limit` events, numbered from 0 over the whole life of the cache, for any number of followers."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self._kept: deque[CacheEvent] = deque(maxlen=limit)
        self.next = 0  # number of the next event

    def append(self, event: CacheEvent) -> None:
        self._kept.append(event)
        self.next += 1

    def since(self, number: int) -> CacheEvents:
        """The events from `number` on, as far as they are kept."""
        oldest = self.next - len(self._kept)
        first = max(number, oldest)
        return CacheEvents(first, tuple(islice(self._kept, first - oldest, None)), gap=number < oldest)


class _Entry:
    """A cached block. `children`: entries of blocks that continue it, by name."""

    __slots__ = ("block", "block_hash", "children", "parent")

    def __init__(self, block: int, block_hash: bytes, parent: _Entry | None) -> None:
        self.block = block
        self.block_hash = block_hash
        self.parent = parent
        self.children: dict[bytes, _Entry] = {}


class PrefixCache:
    """Cached blocks as a forest, in which every path from a root is the beginning of some sequence::

        system prompt        question          answer
        [b0]---[b1]---+---[b7]---[b3]-------[b4]          b0..: blocks, each with its name
                      '---[b9]---[b2]                     a shared beginning exists once

    *Closed*: with a block all blocks before it are in the cache, so the longest cached beginning of a prompt is
    found by looking at its end.

    *Idle* blocks are used by nobody but the cache, and may be evicted at any time. They are ordered by their last
    use; a use of a block is a use of all blocks before it, and comes after that of the block: of a path the tail goes
    first. Two sequences that compute the same tokens at the same time have blocks of their own, of which one is
    cached. So a block may be idle while one that continues it is in use; if it is evicted, those behind it leave the
    cache with it, and stay with whoever uses them.

    Not thread-safe. `refs` arguments are reference counts by block, in which the cache counts as one.
    """

    def __init__(self, events_kept: int = EVENTS_KEPT) -> None:
        self.events = CacheEventLog(events_kept)
        self._by_hash: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Blocks in the cache."""
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def idle(self) -> int:
        """Blocks that can be evicted now."""
        return len(self._idle)

    def names(self) -> list[bytes]:
        """Names of all cached blocks; those of a path in its order."""
        return list(self._by_hash)

    def match(self, hashes: Sequence[bytes], limit: int, guess: int = 0) -> int:
        """How many of the first `limit` blocks named by `hashes` are cached, from the front.

        Takes as many look-ups as the answer differs from `guess`, and two more.
        """
        count = min(guess, limit)
        while count and hashes[count - 1] not in self._by_hash:
            count -= 1
        while count < limit and hashes[count] in self._by_hash:
            count += 1
        return count

    def blocks(self, hashes: Sequence[bytes], count: int) -> list[int]:
        """The first `count` blocks named by `hashes`; they must be cached (see `match`)."""
        return [self._by_hash[name].block for name in hashes[:count]]

    def insert(self, block: int, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Cache a full block that is in use.

        The name must be new and the block before it cached; `parent_hash` is None for the first block of a sequence.
        """
        assert block not in self._by_block, block
        assert block_hash not in self._by_hash, block_hash.hex()
        parent = None if parent_hash is None else self._by_hash[parent_hash]
        entry = _Entry(block, block_hash, parent)
        self._by_hash[block_hash] = self._by_block[block] = entry
        if parent is not None:
            parent.children[block_hash] = entry
        self.events.append(CacheEvent(True, block_hash))

    def use(self, block: int) -> None:
        """Somebody has come to use a cached block."""
        self._idle.pop(block, None)

    def rest(self, block: int, refs: Sequence[int]) -> None:
        """A use of a path down to `block` has ended: those of its blocks that are idle were used last."""
        entry: _Entry | None = self._by_block[block]
        while entry is not None:
            if refs[entry.block] == 1:
                self._idle[entry.block] = None
                self._idle.move_to_end(entry.block)
            entry = entry.parent

    def evict(self) -> list[int]:
        """Drop the idle block that was used longest ago, and what continues it; there must be one.

        Returns the blocks that have left the cache.
        """
        return self.drop(next(iter(self._idle)))

    def drop(self, block: int) -> list[int]:
        """Drop a cached block and what continues it; returns all blocks that have left the cache."""
        top = self._by_block[block]
        if top.parent is not None:
            del top.parent.children[top.block_hash]
        dropped: list[int] = []
        doomed = [top]
        while doomed:
            entry = doomed.pop()
            doomed.extend(entry.children.values())
            del self._by_hash[entry.block_hash], self._by_block[entry.block]
            self._idle.pop(entry.block, None)
            self.events.append(CacheEvent(False, entry.block_hash))
            dropped.append(entry.block)
        return dropped

    def check_integrity(self, refs: Sequence[int]) -> None:
        """Assert what holds between two calls."""
        assert len(self._by_hash) == len(self._by_block)
        for name, entry in self._by_hash.items():
            assert entry.block_hash == name
            assert self._by_block[entry.block] is entry, f"block {entry.block} is cached under two names"
            assert all(child.parent is entry for child in entry.children.values())
            if entry.parent is not None:
                assert self._by_hash.get(entry.parent.block_hash) is entry.parent, "a block lacks the one before it"
                assert entry.parent.children[name] is entry
        assert self._idle.keys() == {block for block in self._by_block if refs[block] == 1}
        rank = {block: i for i, block in enumerate(self._idle)}
        for block in self._idle:
            above = self._by_block[block].parent
            while above is not None and above.block not in rank:
                above = above.parent
            assert above is None or rank[above.block] > rank[block], "a block would be evicted before its tail"
