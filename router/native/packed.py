"""Names of blocks and sets of workers as C reads them."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from pdcore.hashing import HASH_BYTES
from router.worker_sets import WorkerSet

_WORD = 8


class PackedSets:
    """Sets of workers as words of 64 bits, as many as the highest number takes that was ever told."""

    def __init__(self) -> None:
        self.words = 1
        self._last: tuple[WorkerSet, int, bytes] = (0, 0, b"")

    def hold(self, worker: int) -> None:
        """From now on sets have a bit for this number."""
        self.words = max(self.words, worker // 64 + 1)

    def packed(self, workers: WorkerSet) -> bytes:
        """Without those whose numbers are higher."""
        # Mostly it is the same set as the last time, which is the very same object then.
        last, words, packed = self._last
        if last is not workers or words != self.words:
            words = self.words
            packed = (workers & (1 << 64 * words) - 1).to_bytes(_WORD * words, "little")
            self._last = workers, words, packed
        return packed


def joined_names(names: Sequence[bytes]) -> bytes:
    """One after the other; ValueError if one is no name."""
    joined = b"".join(names)
    if len(joined) != HASH_BYTES * len(names):
        raise ValueError(f"names of blocks have {HASH_BYTES} bytes")
    return joined


def seed() -> tuple[int, int]:
    """Two random words."""
    first, second = struct.unpack("2Q", os.urandom(16))
    return first, second
