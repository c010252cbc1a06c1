"""Room for frames in a ring of memory. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

ALIGNMENT: Final = 64


class _Region:
    __slots__ = ("free", "offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size, self.free = offset, size, False


class RingSpace:
    """Contiguous regions of a ring, taken in order and given back in any order.

    ::

        |...free...[ oldest ][ given back, kept ][    ][ newest ]......free......|
                   ^ tail                                       ^ head

    A region that does not fit behind the newest begins at 0 again. What is given back is free only once everything
    older is: frames are answered nearly in order, and a search for holes would cost more than it finds. Once all
    regions are given back the ring begins at 0. Not thread-safe.

    Args:
        size: of the ring, bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._regions: deque[_Region] = deque()
        self._by_offset: dict[int, _Region] = {}

    @property
    def empty(self) -> bool:
        """Nothing is taken."""
        return not self._regions

    def fits(self, size: int) -> bool:
        """`take` would find room."""
        return self._place(_padded(size)) is not None

    def take(self, size: int) -> int | None:
        """Offset of a new region of `size` (>= 1) bytes, a multiple of `ALIGNMENT`; None if there is no room."""
        padded = _padded(size)
        offset = self._place(padded)
        if offset is not None:
            region = _Region(offset, padded)
            self._regions.append(region)
            self._by_offset[offset] = region
        return offset

    def give(self, offset: int) -> None:
        """Give back the region at `offset`, once."""
        self._by_offset.pop(offset).free = True
        while self._regions and self._regions[0].free:
            self._regions.popleft()

    def _place(self, size: int) -> int | None:
        if not self._regions:
            return 0 if size <= self._size else None
        newest = self._regions[-1]
        tail, head = self._regions[0].offset, newest.offset + newest.size
        if newest.offset < tail:  # wrapped: free is [head, tail)
            return head if size <= tail - head else None
        if size <= self._size - head:
            return head
        return 0 if size <= tail else None


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
