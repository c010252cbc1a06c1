"""Prompts that workers were sent and have not announced yet. Pure.

Requests that belong together often arrive together: the second must find its way to the first one's worker before
that has computed anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from pdcore.hashing import HASH_BYTES
from router.fleet import Column
from router.native.prefix_tree import NativePrefixTree, native_prefix_tree
from router.prefix_tree import PrefixTree
from router.worker_sets import Group, WorkerSet


class _Prompt(NamedTuple):
    """A prompt that a worker was sent. `end`: where it ends in the tree."""

    until: float
    end: Any


class ExpectedPrefixes:
    """A prompt is expected until its worker's events name its last block (`end`), its time is up (`expire`), its
    worker is gone (`forget`), or, the oldest first, there are more than the limit.

    Args:
        limit: names of blocks and prompts, together, that are kept at most. lifetime_s: how long a prompt counts.
        tree: an empty one; None is the fastest there is.
    """

    def __init__(self, limit: int, lifetime_s: float, tree: PrefixTree | NativePrefixTree | None = None) -> None:
        self._limit = limit
        self._lifetime_s = lifetime_s
        self._tree = tree if tree is not None else new_tree()
        # By worker and last name, the oldest first: all live equally long.
        self._prompts: OrderedDict[tuple[int, bytes], _Prompt] = OrderedDict()
        self._last_names: dict[int, set[bytes]] = {}
        self.changes = 0
        """Goes up with every change of what `match` finds."""

    def __len__(self) -> int:
        """Names of blocks and prompts, together."""
        return self._tree.names + len(self._prompts)

    def add(self, workers: Iterable[int], hashes: Sequence[bytes], joined: bytes, now: float) -> None:
        """These workers were sent a prompt of these full blocks. `now`, in seconds, never goes back.

        Of a prompt above the limit the beginning counts. `joined`: the names one after the other.
        """
        if len(hashes) >= self._limit:
            count = max(0, self._limit - 1)
            hashes, joined = hashes[:count], joined[: HASH_BYTES * count]
        if not hashes:
            return
        last_name = hashes[-1]
        tree, until, end = self._tree, now + self._lifetime_s, None  # the same prompt has the same end
        try:
            for worker in workers:
                key = (worker, last_name)
                sent = self._prompts.get(key)
                if sent is not None:  # once more
                    end = sent.end
                    self._prompts[key] = _Prompt(until, end)
                    self._prompts.move_to_end(key)
                    continue
                if end is None:
                    end = tree.enter(worker, hashes, joined)
                else:
                    tree.join(worker, end)
                self.changes += 1
                self._prompts[key] = _Prompt(until, end)
                last_names = self._last_names.get(worker)
                if last_names is None:
                    self._last_names[worker] = {last_name}
                else:
                    last_names.add(last_name)
        finally:  # also where memory is wanting for the next one
            while len(self) > self._limit:
                self.end(*next(iter(self._prompts)))

    def last_names(self, worker: int) -> Set[bytes]:
        """Last names of the worker's prompts; whoever sees one of them in an event calls `end`."""
        return self._last_names.get(worker, frozenset())

    def end(self, worker: int, last_name: bytes) -> None:
        """The prompt of this worker that ends so counts no longer; KeyError if there is none."""
        prompt = self._prompts.pop((worker, last_name))
        self.changes += 1
        last_names = self._last_names[worker]
        last_names.remove(last_name)
        if not last_names:
            del self._last_names[worker]
        self._tree.leave(worker, prompt.end)

    def expire(self, now: float) -> None:
        """End the prompts whose time is up."""
        while self._prompts:
            key = next(iter(self._prompts))
            if self._prompts[key].until > now:
                return
            self.end(*key)

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        for last_name in list(self.last_names(worker)):
            self.end(worker, last_name)

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> list[Group]:
        """See `PrefixTree.match`."""
        return self._tree.match(hashes, among)

    def fill(self, column: Column, hashes: Sequence[bytes], joined: bytes, among: WorkerSet, value: float) -> bool:
        """See `PrefixTree.fill`."""
        return bool(self._prompts) and self._tree.fill(column, hashes, joined, among, value)

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        self._tree.check_integrity()
        ends: dict[int, set[bytes]] = {}
        for worker, last_name in self._prompts:
            ends.setdefault(worker, set()).add(last_name)
        assert ends == self._last_names
        assert bool(self._tree.names) == bool(self._prompts)
        untils = [prompt.until for prompt in self._prompts.values()]
        assert untils == sorted(untils)
        assert len(self) <= max(self._limit, 0)


def new_tree() -> PrefixTree | NativePrefixTree:
    """The fastest there is."""
    native = native_prefix_tree()
    return PrefixTree() if native is None else native
