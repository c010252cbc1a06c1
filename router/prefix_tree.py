"""Prompts of workers in a radix tree: one of any length takes as many steps as there are branches on its way::

    (root)---[a b c d]---+---[e f]         worker 3 was sent  a b c d e f
                         '---[g]           worker 5 was sent  a b c d g,  and worker 3 as well

Pure. `router.native.prefix_tree` is the same in C, and several times as fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.fleet import Column
from router.worker_sets import Group, WorkerSet, spread


@dataclass(slots=True, eq=False)
class Edge:
    """A run of names that no prompt leaves in its middle.

    Attributes:
        names: never empty but at the root. children: edges that go on behind the last name, by their first.
        prompts: by worker, how many of its prompts go through here or end here. workers: those of `prompts`.
    """

    names: Sequence[bytes]
    parent: Edge | None
    children: dict[bytes, Edge] = field(default_factory=dict)
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


class PrefixTree:
    """Workers are small numbers, see `router.worker_sets`. Whatever takes names takes them twice: as a list, and
    (`joined`) one after the other for whoever reads them so."""

    def __init__(self) -> None:
        self._root = Edge([], None)
        self.names = 0
        """Of all edges."""

    def enter(self, worker: int, hashes: Sequence[bytes], joined: bytes) -> Edge:
        """The worker has a prompt of these names, at least one. Returns where it ends, for `join` and `leave`."""
        edge = self._root
        depth = 0
        while depth < len(hashes):
            edge = self._step(edge, hashes, depth)
            edge.enter(worker)
            depth += len(edge.names)
        return edge

    def join(self, worker: int, end: Edge) -> None:
        """The worker has a prompt that ends there, as another one does."""
        edge = end
        while edge.parent is not None:
            edge.enter(worker)
            edge = edge.parent

    def _step(self, edge: Edge, hashes: Sequence[bytes], depth: int) -> Edge:
        """The next edge on the way of a prompt, made where there is none that is part of it."""
        child = edge.children.get(hashes[depth])
        if child is None:
            child = edge.children[hashes[depth]] = Edge(hashes[depth:], edge)
            self.names += len(child.names)
            return child
        common = child.agreement(hashes, depth)
        if common == len(child.names):
            return child
        # What is common becomes an edge of its own. All who go through the rest go through it, and `child` stays the
        # rest, so that prompts that end there need not be told.
        upper = Edge(child.names[:common], edge, prompts=dict(child.prompts), workers=child.workers)
        edge.children[hashes[depth]] = upper
        child.names = child.names[common:]
        child.parent = upper
        upper.children[child.names[0]] = child
        return upper

    def leave(self, worker: int, end: Edge) -> None:
        """A prompt of the worker that ends there is gone."""
        edge = end
        while edge.parent is not None:
            edge.leave(worker)
            if not edge.workers:
                del edge.parent.children[edge.names[0]]
                self.names -= len(edge.names)
            edge = edge.parent

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> list[Group]:
        """Who `among` these has at least so much of the beginning of this prompt, in rising order of blocks; groups
        with nobody in them are left out."""
        groups: list[Group] = []
        edge = self._root
        depth = 0
        # Behind an edge that the prompt leaves in its middle there is no next one: no name is at two depths.
        while depth < len(hashes) and (child := edge.children.get(hashes[depth])) is not None:
            depth += child.agreement(hashes, depth)
            if workers := child.workers & among:
                groups.append(Group(depth, workers))
            edge = child
        return groups

    def fill(self, column: Column, hashes: Sequence[bytes], joined: bytes, among: WorkerSet, value: float) -> bool:
        """Raise a column by number to `value` for every block that each worker has. Returns whether any has one."""
        groups = self.match(hashes, among)
        if groups:
            spread(column, [group.workers for group in groups], [value * group.blocks for group in groups])
        return bool(groups)

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
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
        assert names == self.names
