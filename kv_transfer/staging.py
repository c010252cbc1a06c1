"""Frames in and out of rings that two processes share."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.lanes import ExpectedFrame, LoadedFrame
from kv_transfer.ring import ALIGNMENT, RingSpace
from pdcore.errors import FrameError

PAGE: Final = 4096


class RingLoader:
    """Copies frames into a ring. One thread loads; any thread unloads.

    Args:
        memory: bytes of the ring. space: which of them are taken.
    """

    def __init__(self, memory: NDArray[np.uint8], space: RingSpace) -> None:
        self._memory = memory
        self._space = space
        self._lock = threading.Lock()

    def has_room(self, size: int) -> bool:
        with self._lock:
            return self._space.fits(size)

    def load(self, frame: bytes) -> LoadedFrame | None:
        """Copy a frame in; None if there is no room."""
        with self._lock:
            offset = self._space.take(len(frame))
        if offset is None:
            return None
        copy_bytes(frame, self._memory[offset : offset + len(frame)])
        return LoadedFrame(len(frame), offset, None)

    def unload(self, loaded: LoadedFrame) -> None:
        with self._lock:
            self._space.give(loaded.offset)


def ring_bytes(credit_bytes: int) -> int:
    """Size of the ring of a stream with so much credit: that, in whole pages."""
    return -(-credit_bytes // PAGE) * PAGE


def frame_bytes(memory: NDArray[np.uint8], frame: ExpectedFrame) -> memoryview | None:
    """Where a frame lies in a ring; None if it is not wanted. Raises `FrameError` if it cannot lie there."""
    if frame.offset % ALIGNMENT or frame.offset + frame.total > memory.size:
        raise FrameError(f"a frame of {frame.total} bytes at {frame.offset} of a ring of {memory.size}")
    return memory[frame.offset : frame.offset + frame.total].data if frame.wanted else None


def copy_bytes(data: bytes | memoryview, out: NDArray[np.uint8]) -> None:
    """Copy bytes without holding the GIL, which neither slices of ``bytes`` nor of a memoryview let go."""
    np.copyto(out, np.frombuffer(data, np.uint8))


def private_copy(data: memoryview) -> memoryview:
    """The bytes of `data` in memory of this process alone."""
    out = np.empty(len(data), np.uint8)
    copy_bytes(data, out)
    return out.data
