"""`router.prefix_tree.PrefixTree` in C."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np

from pdcore.hashing import HASH_BYTES
from router.fleet import Column
from router.native.library import address, routing_library
from router.native.packed import PackedSets, joined_names, seed
from router.worker_sets import Group, WorkerSet

_FLOAT64 = np.dtype(np.float64)


class NativePrefixTree:
    """See `router.prefix_tree.PrefixTree`. Raises MemoryError where that is not to be had."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        tree: int | None = library.pdrt_tree_new(*seed())
        if tree is None:
            raise MemoryError("no memory for a tree of prompts")
        self._tree = tree
        self._names = ctypes.c_size_t.from_address(tree)  # its first field
        self._sets = PackedSets()
        weakref.finalize(self, library.pdrt_tree_free, tree)

    @property
    def names(self) -> int:
        """Of all edges."""
        return self._names.value

    def enter(self, worker: int, hashes: Sequence[bytes], joined: bytes) -> int:
        """Returns where the prompt ends, for `join` and one `leave`."""
        assert len(joined) == HASH_BYTES * len(hashes) > 0
        self._sets.hold(worker)
        end: int | None = self._library.pdrt_tree_enter(self._tree, worker, joined, len(hashes))
        if end is None:
            raise MemoryError("no memory for a prompt that was sent")
        return end

    def join(self, worker: int, end: int) -> None:
        self._sets.hold(worker)
        if not self._library.pdrt_tree_join(worker, end):
            raise MemoryError("no memory for a prompt that was sent")

    def leave(self, worker: int, end: int) -> None:
        self._library.pdrt_tree_leave(self._tree, worker, end)

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> list[Group]:
        words = self._sets.words
        depths, sets = np.zeros(len(hashes), np.uint64), np.zeros((len(hashes), words), np.uint64)
        args = len(hashes), self._sets.packed(among), words, 0.0, None, 0, address(depths), address(sets)
        groups = self._library.pdrt_tree_match(self._tree, joined_names(hashes), *args)
        return [
            Group(int(depths[number]), int.from_bytes(sets[number].tobytes(), "little")) for number in range(groups)
        ]

    def fill(self, column: Column, hashes: Sequence[bytes], joined: bytes, among: WorkerSet, value: float) -> bool:
        assert len(joined) == HASH_BYTES * len(hashes)
        assert column.dtype is _FLOAT64
        sets = self._sets
        args = sets.packed(among), sets.words, value, address(column), len(column), None, None
        return bool(self._library.pdrt_tree_match(self._tree, joined, len(hashes), *args))

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        assert self._library.pdrt_tree_intact(self._tree)


def native_prefix_tree() -> NativePrefixTree | None:
    """None if there is no native code."""
    library = routing_library()
    return None if library is None else NativePrefixTree(library)
