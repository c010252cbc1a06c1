"""`router.holders.Holders` in C."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from pdcore.hashing import HASH_BYTES
from router.fleet import Column
from router.native.library import address, routing_library
from router.native.packed import PackedSets, joined_names, seed
from router.worker_sets import Group, WorkerSet

_FLOAT64 = np.dtype(np.float64)


class NativeHolders:
    """See `router.holders.Holders`. Raises MemoryError where that is not to be had."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._table: int | None = library.pdrt_holders_new(*seed())
        if self._table is None:
            raise MemoryError("no memory for an index of prefixes")
        self._match = library.pdrt_holders_match
        self._sets = PackedSets()  # with words for the highest number that ever held anything
        weakref.finalize(self, library.pdrt_holders_free, self._table)

    def __len__(self) -> int:
        return int(self._library.pdrt_holders_names(self._table))

    def add(self, worker: int, names: Sequence[bytes]) -> None:
        self._sets.hold(worker)
        self._change(worker, names, True)

    def remove(self, worker: int, names: Sequence[bytes]) -> None:
        self._change(worker, names, False)

    def _change(self, worker: int, names: Sequence[bytes], with_it: bool) -> None:
        joined = joined_names(names)
        if self._library.pdrt_holders_change(self._table, worker, joined, len(names), with_it) != len(names):
            raise MemoryError("no memory for the names of blocks")

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> Iterator[Group]:
        depths = np.zeros(len(hashes), np.uint64)
        sets = np.zeros((len(hashes), self._sets.words), np.uint64)
        args = len(hashes), self._sets.packed(among), 0.0, None, 0, address(depths), address(sets)
        for number in range(self._checked(self._match(self._table, joined_names(hashes), *args))):
            yield Group(int(depths[number]), int.from_bytes(sets[number].tobytes(), "little"))

    def fill(self, column: Column, hashes: Sequence[bytes], joined: bytes, among: WorkerSet, value: float) -> bool:
        assert len(joined) == HASH_BYTES * len(hashes)
        assert column.dtype is _FLOAT64
        args = len(hashes), self._sets.packed(among), value, address(column), len(column), None, None
        return self._checked(self._match(self._table, joined, *args)) > 0

    def items(self) -> dict[bytes, WorkerSet]:
        names, sets = np.zeros((len(self), HASH_BYTES), np.uint8), np.zeros((len(self), self._sets.words), np.uint64)
        self._library.pdrt_holders_dump(self._table, address(names), address(sets))
        return {
            name.tobytes(): int.from_bytes(workers.tobytes(), "little")
            for name, workers in zip(names, sets, strict=True)
        }

    @staticmethod
    def _checked(groups: int) -> int:
        if groups < 0:
            raise MemoryError("no memory to look up prefixes")
        return groups


def native_holders() -> NativeHolders | None:
    """None if there is no native code."""
    library = routing_library()
    return None if library is None else NativeHolders(library)
