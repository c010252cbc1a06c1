"""Sets of workers as bits of an int, and the small numbers that this takes. Pure.

A thousand workers are 125 bytes, and what a policy asks of them (who serves, who has room, who holds a prefix) is
joined by ``&``, ``|`` and ``~`` in well under a microsecond.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.native.library import address, routing_library

FEW = 4
"""Workers that are faster gone through one by one."""

WorkerSet = int
"""Bit ``n`` is set if the worker of number ``n`` is in the set. Never negative."""


class Group(NamedTuple):
    """Workers that hold the first `blocks` blocks of a prompt."""

    blocks: int
    workers: WorkerSet


def members(workers: WorkerSet) -> Iterator[int]:
    """Numbers in the set, in rising order."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest


def spread(column: NDArray[np.float64], sets: Sequence[WorkerSet], values: Sequence[float]) -> None:
    """Raise the column, by number, to each set's value where its members are, if it is below that.

    Numbers that the column does not have are passed over.
    """
    if sum(map(int.bit_count, sets)) <= FEW:
        for workers, value in zip(sets, values, strict=True):
            for number in members(workers):
                if number < len(column) and column[number] < value:
                    column[number] = value
        return
    size = -(-max(sets, default=0).bit_length() // 64) * 8  # whole words
    packed = b"".join([workers.to_bytes(size, "little") for workers in sets])
    library = routing_library()
    if library is not None:
        by_set = struct.pack(f"{len(values)}d", *values)
        library.pdrt_spread(packed, len(sets), size // 8, by_set, address(column), len(column))
        return
    bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(sets), size), axis=1, bitorder="little")
    owners, numbers = bits[:, : len(column)].view(np.bool_).nonzero()
    np.maximum.at(column, numbers, np.array(values)[owners])


class WorkerNumbers:
    """Numbers from 0 for those workers that there are; one that is gone gives its number to a later one.

    So the highest number stays below the largest count of workers that there ever was at one time.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids: list[str | None] = []
        self._free: list[int] = []  # a heap, so that numbers stay small

    def __len__(self) -> int:
        """One more than the highest number that was ever in use: the length of arrays by number."""
        return len(self._ids)

    def __contains__(self, worker_id: object) -> bool:
        """Whether the worker has a number."""
        return worker_id in self._numbers

    def take(self, worker_id: str) -> int:
        """The worker's number; a new one if it has none."""
        number = self._numbers.get(worker_id)
        if number is not None:
            return number
        if self._free:
            number = heapq.heappop(self._free)
            self._ids[number] = worker_id
        else:
            number = len(self._ids)
            self._ids.append(worker_id)
        self._numbers[worker_id] = number
        return number

    def release(self, worker_id: str) -> None:
        """The worker is gone, and whatever was kept under its number must be as well; KeyError if it has none."""
        number = self._numbers.pop(worker_id)
        self._ids[number] = None
        heapq.heappush(self._free, number)

    def id_of(self, number: int) -> str:
        """Who has the number; KeyError if nobody has."""
        worker_id = self._ids[number] if 0 <= number < len(self._ids) else None
        if worker_id is None:
            raise KeyError(number)
        return worker_id
