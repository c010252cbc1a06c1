"""What this router knows of its workers' prefix caches, by what they report and by what it has just sent them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pdcore.clock import Clock
from pdcore.hashing import HASH_BYTES, block_hashes, chain_root
from protos import worker_pb2
from router.fleet import Column
from router.prefix_index import IndexCounts, PrefixIndex
from router.worker_sets import WorkerNumbers, WorkerSet

logger = logging.getLogger(__name__)

MAX_BLOCKS = 2_000_000
"""Entries of the index at most: a few hundred bytes each where nobody else has the block."""

Naming = tuple[str, int]
"""What names of blocks depend on beside the tokens: the digest of the worker's model and its block size."""


class PromptNames:
    """Names of a prompt's full blocks, for each way of naming; each is computed once.

    Args:
        salt: the request's; what others have cached under another salt is none of its business.
    """

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self._tokens = tokens
        self._salt = salt
        self._names: dict[Naming, list[bytes]] = {}
        self._joined: dict[Naming, bytes] = {}
        self.found: tuple[object, Column | None] = (None, None)
        """What was last found to be cached of it, behind what it depends on."""

    def joined(self, naming: Naming) -> bytes:
        """The same one after the other."""
        joined = self._joined.get(naming)
        if joined is None:
            joined = self._joined[naming] = b"".join(self.by(naming))
        return joined

    def by(self, naming: Naming) -> list[bytes]:
        """The names as workers of this naming give them."""
        names = self._names.get(naming)
        if names is None:
            digest, block_size = naming
            root = chain_root(digest, salt=self._salt)
            names = self._names[naming] = block_hashes(root, self._tokens, block_size)
        return names


class Prefixes:
    """Follows the prefix caches of the connected workers. Everything happens on one event loop.

    Args:
        numbers: of the workers; whoever owns them keeps one for as long as its worker is connected.
    """

    def __init__(self, clock: Clock, numbers: WorkerNumbers, max_blocks: int = MAX_BLOCKS) -> None:
        self._clock = clock
        self._index = PrefixIndex(max_blocks)
        self.numbers = numbers
        self._namings: dict[str, Naming] = {}
        self._groups: dict[Naming, WorkerSet] = {}
        self._sessions = 0  # that began or ended

    @property
    def counts(self) -> IndexCounts:
        return self._index.counts

    def connected(self, worker_id: str, naming: Naming) -> None:
        """A session with the worker begins; nothing is known of its cache."""
        self.lost(worker_id)
        self._sessions += 1
        self._namings[worker_id] = naming
        self._groups[naming] = self._groups.get(naming, 0) | 1 << self.numbers.take(worker_id)

    def lost(self, worker_id: str) -> None:
        """The session has ended. Idempotent."""
        naming = self._namings.pop(worker_id, None)
        if naming is None:
            return
        self._sessions += 1
        number = self.numbers.take(worker_id)
        self._index.forget(number)
        self._groups[naming] &= ~(1 << number)
        if not self._groups[naming]:
            del self._groups[naming]

    def hear(self, worker_id: str, news: worker_pb2.CacheEvents) -> None:
        """A report's news of the worker's cache. News that make no sense are forgotten, with all before them."""
        if worker_id not in self._namings:
            return
        number = self.numbers.take(worker_id)
        if len(news.names) != HASH_BYTES * sum(map(abs, news.runs)) or 0 in news.runs:
            logger.error("%s: cache events of %d bytes do not fit their runs", worker_id, len(news.names))
            self._index.forget(number)
            return
        self._index.apply(number, news.first, list(_events(news)), gap=news.reset)

    def cached(self, prompt: PromptNames) -> Column | None:
        """Tokens of the prompt's beginning that workers have or are about to have, by number; None if nobody has.

        The column is not to be changed.
        """
        now = self._clock.now()
        # A request that has just come is looked at twice, before and after it was let in.
        state = self._index.version(now), self._sessions, len(self.numbers)
        if prompt.found[0] == state:
            return prompt.found[1]
        column = np.zeros(len(self.numbers))
        found = False
        for naming, workers in self._groups.items():
            names, joined = prompt.by(naming), prompt.joined(naming)
            found |= self._index.fill(column, names, joined, now, value=naming[1], among=workers)
        prompt.found = state, column if found else None
        return prompt.found[1]

    def expect(self, worker_ids: Iterable[str], prompt: PromptNames) -> None:
        """The prompt was sent to these workers, or to one that will send its KV to the others."""
        by_naming: dict[Naming, list[int]] = {}
        for worker_id in worker_ids:
            naming = self._namings.get(worker_id)
            if naming is not None:
                by_naming.setdefault(naming, []).append(self.numbers.take(worker_id))
        now = self._clock.now()
        for naming, workers in by_naming.items():
            self._index.expect(workers, prompt.by(naming), now, prompt.joined(naming))


def _events(news: worker_pb2.CacheEvents) -> Iterator[tuple[bool, bytes]]:
    at = 0
    for run in news.runs:
        for _ in range(abs(run)):
            yield run > 0, news.names[at : at + HASH_BYTES]
            at += HASH_BYTES


def lacking(tokens: int, cached: Column | None) -> int:
    """Tokens of a prompt that have to be computed wherever it goes: its last one always."""
    return tokens if cached is None else max(1, tokens - int(cached.max()))
