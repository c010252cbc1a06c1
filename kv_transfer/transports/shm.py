"""Frames through shared memory: a ring in an anonymous file (memfd) of the sender, mapped by the receiver.

The file has no name anywhere, so that nothing is left behind whoever dies: the receiver opens it as
``/proc/<pid>/fd/<fd>``, which asks for the same host, the same PID namespace and the same user. Its size is sealed:
no peer can shrink it under a reader. The receiver maps it for reading only, and what it reads may change while it
does: `FrameSink.arrived` says so.

::

    | page: magic, nonce, zeros | ring: frames at multiples of 64 |
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.lanes import ExpectedFrame, FrameSink, LaneError, LaneListener, LoadedFrame
from kv_transfer.messages import GroupStore, LaneFrame, NixlStaging, ShmRing
from kv_transfer.ring import RingSpace
from kv_transfer.staging import PAGE, RingLoader, frame_bytes, ring_bytes
from pdcore.memory import available_memory

_MAGIC: Final = b"PDKVRING"
_NONCE_BYTES: Final = 16
_MOST_OF_AVAILABLE: Final = 0.1  # of the machine's memory, for one ring
_SEALS: Final = (
    getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
)


def available() -> bool:
    """This system has sealed memory files, and shows a process's open files to its peers."""
    return hasattr(os, "memfd_create") and bool(_SEALS) and os.path.isdir("/proc/self/fd")


class ShmSendLane:
    """`SendLane` through shared memory. It has no thread.

    Args:
        credit_bytes: of the stream. listener: hears that the lane is ready.
    """

    transport = "shm"

    def __init__(self, credit_bytes: int, listener: LaneListener) -> None:
        self._size = ring_bytes(credit_bytes)
        self._listener = listener
        self._file = -1
        self._loader: RingLoader | None = None

    def offer(self) -> ShmRing:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        available = available_memory()
        # Memory that is promised to a file is not refused when it is short: the kernel kills somebody for it.
        if available is not None and self._size > _MOST_OF_AVAILABLE * available:
            raise LaneError(f"no shared memory of {self._size} bytes: {available} are available")
        try:
            self._file = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # All at once: memory that turns out to be missing at the first write would kill the process.
            os.posix_fallocate(self._file, 0, PAGE + self._size)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(self._file, PAGE + self._size)
        except OSError as error:
            self._close_file()
            raise LaneError(f"no shared memory of {self._size} bytes: {error}") from error
        mapping[: len(_MAGIC)] = _MAGIC
        mapping[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES] = nonce
        self._loader = RingLoader(np.frombuffer(mapping, np.uint8)[PAGE:], RingSpace(self._size))
        return ShmRing(os.getpid(), self._file, self._size, nonce)

    def accepted(self, how: GroupStore | NixlStaging | None) -> None:
        self._close_file()  # the receiver has mapped it
        self._listener.on_ready()

    def has_room(self, frame_bytes: int) -> bool:
        loader = self._loader
        return loader is not None and loader.has_room(frame_bytes)

    def load(self, frame: bytes) -> LoadedFrame | None:
        loader = self._loader
        return None if loader is None else loader.load(frame)

    def post(self, loaded: LoadedFrame, frame: LaneFrame, announce: Callable[[LaneFrame], None]) -> None:
        announce(frame._replace(offset=loaded.offset))

    def unload(self, loaded: LoadedFrame) -> None:
        loader = self._loader
        if loader is not None:
            loader.unload(loaded)

    def close(self) -> None:
        self._loader = None
        self._close_file()

    def join(self, timeout_s: float) -> None:
        pass

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class ShmReceiveLane:
    """`ReceiveLane` through shared memory. It has no thread: a frame is here when it is announced.

    Args:
        ring: what the sender said. credit_bytes: of the stream. sink: hears of frames.
    """

    transport = "shm"

    def __init__(self, ring: ShmRing, credit_bytes: int, sink: FrameSink) -> None:
        self._ring = ring
        self._expected_size = ring_bytes(credit_bytes)
        self._sink = sink
        self._memory: NDArray[np.uint8] | None = None

    def accept(self) -> None:
        ring = self._ring
        if ring.size != self._expected_size:
            raise LaneError(f"a ring of {ring.size} bytes; this stream's has {self._expected_size}")
        try:
            mapping = _map(f"/proc/{ring.pid}/fd/{ring.fd}", PAGE + ring.size)
        except OSError as error:
            raise LaneError(f"the sender's shared memory cannot be opened: {error}") from error
        # It could be somebody else's by now, in a process or a file that came to have the number.
        if mapping[: len(_MAGIC)] != _MAGIC or mapping[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES] != ring.nonce:
            raise LaneError("what was opened is not the sender's ring")
        self._memory = np.frombuffer(mapping, np.uint8)[PAGE:]

    def expect(self, frame: ExpectedFrame) -> None:
        memory = self._memory
        if memory is None:
            self._sink.lost(frame)
            return
        self._sink.arrived(frame, frame_bytes(memory, frame), shared=True)

    def close(self) -> None:
        self._memory = None

    def join(self, timeout_s: float) -> None:
        pass


def _map(path: str, size: int) -> mmap.mmap:
    """Map a sealed file of exactly `size` bytes for reading. Raises `OSError`."""
    # Looked at before it is opened: opening a pipe or a device could wait, or do something.
    _check(os.stat(path), size)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        _check(os.fstat(file), size)
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("its size is not sealed")
        return mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)


def _check(status: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise OSError(f"it is no file of {size} bytes")
