"""`router.holders.Holders` in C."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from pdcore.hashing import HASH_BYTES
from router.expected_prefixes import Group
from router.fleet import Column
from router.native.library import address, routing_library
from router.worker_sets import WorkerSet

_WORD = 8
_FLOAT64 = np.dtype(np.float64)


class NativeHolders:
    """See `router.holders.Holders`. Raises MemoryError where that is not to be had."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._table: int | None = library.pdrt_holders_new(*struct.unpack("2Q", os.urandom(16)))
        if self._table is None:
            raise MemoryError("no memory for an index of prefixes")
        self._match = library.pdrt_holders_match
        self._words = 1  # of a set, as C counts them: for the highest number that ever held anything
        self._last_packed: tuple[WorkerSet, int, bytes] = (0, 0, b"")
        weakref.finalize(self, library.pdrt_holders_free, self._table)

    def __len__(self) -> int:
        return int(self._library.pdrt_holders_names(self._table))

    def add(self, worker: int, names: Sequence[bytes]) -> None:
        self._words = max(self._words, worker // 64 + 1)
        self._change(worker, names, True)

    def remove(self, worker: int, names: Sequence[bytes]) -> None:
        self._change(worker, names, False)

    def _change(self, worker: int, names: Sequence[bytes], with_it: bool) -> None:
        joined = _joined(names)
        if self._library.pdrt_holders_change(self._table, worker, joined, len(names), with_it) != len(names):
            raise MemoryError("no memory for the names of blocks")

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> Iterator[Group]:
        depths = np.zeros(len(hashes), np.uint64)
        sets = np.zeros((len(hashes), self._words), np.uint64)
        args = len(hashes), self._packed(among), 0.0, None, 0, address(depths), address(sets)
        for number in range(self._checked(self._match(self._table, _joined(hashes), *args))):
            yield Group(int(depths[number]), int.from_bytes(sets[number].tobytes(), "little"))

    def fill(self, column: Column, hashes: Sequence[bytes], joined: bytes, among: WorkerSet, value: float) -> bool:
        assert len(joined) == HASH_BYTES * len(hashes)
        assert column.dtype is _FLOAT64
        args = len(hashes), self._packed(among), value, address(column), len(column), None, None
        return self._checked(self._match(self._table, joined, *args)) > 0

    def items(self) -> dict[bytes, WorkerSet]:
        names, sets = np.zeros((len(self), HASH_BYTES), np.uint8), np.zeros((len(self), self._words), np.uint64)
        self._library.pdrt_holders_dump(self._table, address(names), address(sets))
        return {
            name.tobytes(): int.from_bytes(workers.tobytes(), "little")
            for name, workers in zip(names, sets, strict=True)
        }

    def _packed(self, among: WorkerSet) -> bytes:
        """Without those who have never held anything."""
        # Mostly it is the same set as the last time, which is the very same object then.
        last, words, packed = self._last_packed
        if last is not among or words != self._words:
            words = self._words
            packed = (among & (1 << 64 * words) - 1).to_bytes(_WORD * words, "little")
            self._last_packed = among, words, packed
        return packed

    @staticmethod
    def _checked(groups: int) -> int:
        if groups < 0:
            raise MemoryError("no memory to look up prefixes")
        return groups


def native_holders() -> NativeHolders | None:
    """None if there is no native code."""
    library = routing_library()
    return None if library is None else NativeHolders(library)


def _joined(names: Sequence[bytes]) -> bytes:
    joined = b"".join(names)
    if len(joined) != HASH_BYTES * len(names):
        raise ValueError(f"names of blocks have {HASH_BYTES} bytes")
    return joined
