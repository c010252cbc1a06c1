"""Prompts that workers were sent and have not announced yet. Pure.

Requests that belong together often arrive together: the second must find its way to the first one's worker before
that has computed anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from router.worker_sets import WorkerSet


class Group(NamedTuple):
    """Workers that hold the first `blocks` blocks of a prompt."""

    blocks: int
    workers: WorkerSet


@dataclass(slots=True, eq=False)
class _Edge:
    """A run of names that no prompt leaves in its middle.

    Attributes:
        names: never empty but at the root. children: edges that go on behind the last name, by their first.
        prompts: by worker, how many of its prompts go through here or end here. workers: those of `prompts`.
    """

    names: Sequence[bytes]
    parent: _Edge | None
    children: dict[bytes, _Edge] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    workers: WorkerSet = 0

    def enter(self, worker: int) -> None:
        self.prompts[worker] = self.prompts.get(worker, 0) + 1
        self.workers |= 1 << worker

    def leave(self, worker: int) -> None:
        self.prompts[worker] -= 1
        if not self.prompts[worker]:
            del self.prompts[worker]
            self.workers ^= 1 << worker

    def agreement(self, hashes: Sequence[bytes], depth: int) -> int:
        """How many of the edge's names are those of the prompt from block `depth` on.

        A name stands for all blocks before it as well, so the first that differs is found by halving.
        """
        names = self.names
        limit = min(len(names), len(hashes) - depth)
        if names[limit - 1] == hashes[depth + limit - 1]:
            return limit
        return bisect_left(range(limit), True, key=lambda i: names[i] != hashes[depth + i])


@dataclass(slots=True)
class _Prompt:
    """A prompt that a worker was sent. `edge`: where it ends."""

    until: float
    edge: _Edge


class ExpectedPrefixes:
    """Prompts in a radix tree, so that one of any length takes as many steps as there are branches on its way::

        (root)---[a b c d]---+---[e f]         worker 3 was sent  a b c d e f
                             '---[g]           worker 5 was sent  a b c d g,  and worker 3 as well

    A prompt leaves the tree when its worker's events name its last block (`end`), when its time is up (`expire`),
    with its worker (`forget`), or, oldest first, when the tree grows over its limit.

    Args:
        limit: names of blocks and prompts, together, that are kept at most. lifetime_s: how long a prompt counts.
    """

    def __init__(self, limit: int, lifetime_s: float) -> None:
        self._limit = limit
        self._lifetime_s = lifetime_s
        self._root = _Edge([], None)
        # By worker and last name, the oldest first: all live equally long.
        self._prompts: OrderedDict[tuple[int, bytes], _Prompt] = OrderedDict()
        self._last_names: dict[int, set[bytes]] = {}
        self._names = 0
        self.changes = 0
        """Goes up with every change of what `match` finds."""

    def __len__(self) -> int:
        """Names of blocks and prompts, together."""
        return self._names + len(self._prompts)

    def add(self, worker: int, hashes: Sequence[bytes], now: float) -> None:
        """The worker was sent a prompt of these full blocks. `now`, in seconds, never goes back.

        Of a prompt above the limit the beginning counts.
        """
        if len(hashes) >= self._limit:
            hashes = hashes[: max(0, self._limit - 1)]
        if not hashes:
            return
        key = (worker, hashes[-1])
        if key in self._prompts:  # the same prompt once more: it has the same end
            self._prompts[key].until = now + self._lifetime_s
            self._prompts.move_to_end(key)
            return
        self.changes += 1
        edge = self._root
        depth = 0
        while depth < len(hashes):
            edge = self._step(edge, hashes, depth)
            edge.enter(worker)
            depth += len(edge.names)
        self._prompts[key] = _Prompt(now + self._lifetime_s, edge)
        self._last_names.setdefault(worker, set()).add(hashes[-1])
        while len(self) > self._limit:
            self.end(*next(iter(self._prompts)))

    def _step(self, edge: _Edge, hashes: Sequence[bytes], depth: int) -> _Edge:
        """The next edge on the way of a prompt, made where there is none that is part of it."""
        child = edge.children.get(hashes[depth])
        if child is None:
            child = edge.children[hashes[depth]] = _Edge(hashes[depth:], edge)
            self._names += len(child.names)
            return child
        common = child.agreement(hashes, depth)
        if common == len(child.names):
            return child
        # What is common becomes an edge of its own. All who go through the rest go through it, and `child` stays the
        # rest, so that prompts that end there need not be told.
        upper = _Edge(child.names[:common], edge, prompts=dict(child.prompts), workers=child.workers)
        edge.children[hashes[depth]] = upper
        child.names = child.names[common:]
        child.parent = upper
        upper.children[child.names[0]] = child
        return upper

    def last_names(self, worker: int) -> Set[bytes]:
        """Last names of the worker's prompts; whoever sees one of them in an event calls `end`."""
        return self._last_names.get(worker, frozenset())

    def end(self, worker: int, last_name: bytes) -> None:
        """The prompt of this worker that ends so counts no longer; KeyError if there is none."""
        edge: _Edge = self._prompts.pop((worker, last_name)).edge
        self.changes += 1
        last_names = self._last_names[worker]
        last_names.remove(last_name)
        if not last_names:
            del self._last_names[worker]
        while edge.parent is not None:
            edge.leave(worker)
            if not edge.workers:
                del edge.parent.children[edge.names[0]]
                self._names -= len(edge.names)
            edge = edge.parent

    def expire(self, now: float) -> None:
        """End the prompts whose time is up."""
        while self._prompts:
            key, prompt = next(iter(self._prompts.items()))
            if prompt.until > now:
                return
            self.end(*key)

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        for last_name in list(self.last_names(worker)):
            self.end(worker, last_name)

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> list[Group]:
        """Who `among` these was sent at least so much of the beginning of this prompt, in rising order of blocks."""
        groups: list[Group] = []
        edge = self._root
        depth = 0
        # Behind an edge that the prompt leaves in its middle there is no next one: no name is at two depths.
        while depth < len(hashes) and (child := edge.children.get(hashes[depth])) is not None:
            depth += child.agreement(hashes, depth)
            groups.append(Group(depth, child.workers & among))
            edge = child
        return groups

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        prompts: dict[int, int] = {}
        names = 0
        edges = [self._root]
        while edges:
            edge = edges.pop()
            names += len(edge.names)
            edges.extend(edge.children.values())
            for first, child in edge.children.items():
                assert child.names[0] == first
                assert child.parent is edge
                assert child.workers == sum(1 << worker for worker in child.prompts) != 0
                assert all(count > 0 for count in child.prompts.values())
                assert edge is self._root or child.workers & ~edge.workers == 0
        assert names == self._names
        for (worker, last_name), prompt in self._prompts.items():
            prompts[worker] = prompts.get(worker, 0) + 1
            assert prompt.edge.names[-1] == last_name
            assert last_name in self._last_names[worker]
        at_root: dict[int, int] = {}
        for child in self._root.children.values():
            for worker, count in child.prompts.items():
                at_root[worker] = at_root.get(worker, 0) + count
        assert at_root == prompts == {worker: len(ends) for worker, ends in self._last_names.items()}
        untils = [prompt.until for prompt in self._prompts.values()]
        assert untils == sorted(untils)
        assert len(self) <= max(self._limit, 0)
