"""Frames through NIXL: the sender writes them, one-sided, into memory that the receiver keeps for the stream.

An optional extra: nothing here imports ``nixl`` before a lane is asked for. Both ends keep a ring of the credit's
size, registered with NIXL; a frame lies at the same offset in both, and is announced once it is written. The receiver
reads it there, and what it reads may change while it does: `FrameSink.arrived` says so.

Seen with NIXL 1.5 and UCX on host memory: a write needs nothing of the receiver but its agent's metadata; it ends
with an error when the receiver is gone; and one that is late lands in memory that was deregistered meanwhile. So
memory is not given back when its lane closes: it rests, and serves another lane after a while.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_transfer.lanes import ExpectedFrame, FrameSink, LaneError, LaneListener, LoadedFrame
from kv_transfer.messages import GroupStore, LaneFrame, NixlStaging, NixlWriter
from kv_transfer.ring import RingSpace
from kv_transfer.staging import RingLoader, frame_bytes, ring_bytes
from kv_transfer.threads import pin_thread
from pdcore.tracebacks import wordless

logger = logging.getLogger(__name__)

_DEPTH: Final = 4  # writes started and not waited for
_POLL_S: Final = 0.00005
_REST_S: Final = 60.0  # of memory that a late write could still reach
_HOST_MEMORY: Final = "DRAM"

T = TypeVar("T")


def available() -> bool:
    """NIXL is installed, with one of its backends."""
    backends = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
    return importlib.util.find_spec("nixl") is not None and any(map(importlib.util.find_spec, backends))


@dataclass(slots=True, eq=False)
class _Memory:
    """Bytes that NIXL knows."""

    data: NDArray[np.uint8]
    registration: Any

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


class NixlAgent:
    """The NIXL agent of one sender or receiver, made when it is first needed. Thread-safe: one call at a time.

    Every method but `rest` and `close` raises `LaneError` for whatever NIXL objects to.

    Args:
        receives: it is written to. Then it has a thread of its own, which takes a fifth of a core even when idle; who
            writes looks after its writes itself.
    """

    def __init__(self, receives: bool) -> None:
        self._receives = receives
        self._lock = threading.Lock()
        self._agent: Any = None
        self._resting: deque[tuple[float, NDArray[np.uint8]]] = deque()

    def memory(self, size: int) -> _Memory:
        """Registered memory of `size` bytes, of any content."""
        with self._lock:
            data = self._rested(size)
            return self._call(lambda agent: _Memory(data, agent.register_memory([_region(data)], _HOST_MEMORY)))

    def rest(self, memory: _Memory) -> None:
        """The lane that used this memory is closed."""
        with self._lock:
            self._resting.append((time.monotonic(), memory.data))
            with contextlib.suppress(LaneError):  # then it stays registered, which costs nothing
                self._call(lambda agent: agent.deregister_memory(memory.registration))

    def close(self) -> None:
        """End the agent, and its thread with it."""
        with self._lock:
            self._agent = None

    def metadata(self) -> bytes:
        """What another agent must know to write into this one's memory."""
        with self._lock:
            return bytes(self._call(lambda agent: agent.get_agent_metadata()))

    def meet(self, metadata: bytes) -> str:
        """Get to know the agent of this metadata; returns its name.

        The first write connects, and has its bound: a connection made here would hold the lock, without one.
        """
        with self._lock:

            def learn(agent: Any) -> str:
                name = agent.add_remote_agent(metadata)
                return str(name.decode() if isinstance(name, bytes) else name)

            return self._call(learn)

    def write(self, source: NDArray[np.uint8], address: int, peer: str) -> Any:
        """Start to write `source`, a part of this agent's memory, to `address` in that of `peer`; returns what `done`
        and `release` take."""
        with self._lock:

            def start(agent: Any) -> Any:
                ours = agent.get_xfer_descs([(int(source.ctypes.data), source.size, 0)], _HOST_MEMORY)
                theirs = agent.get_xfer_descs([(address, source.size, 0)], _HOST_MEMORY)
                handle = agent.initialize_xfer("WRITE", ours, theirs, peer)
                try:
                    _check(agent.transfer(handle))
                except BaseException:
                    agent.release_xfer_handle(handle)
                    raise
                return handle

            return self._call(start)

    def done(self, handle: Any) -> bool:
        """The write has reached the peer's memory."""
        with self._lock:
            return self._call(lambda agent: _check(agent.check_xfer_state(handle)))

    def release(self, handle: Any) -> None:
        with self._lock:
            self._call(lambda agent: agent.release_xfer_handle(handle))

    def _call(self, call: Callable[[Any], T]) -> T:
        """One call of the agent, under the lock. NIXL's errors have no common base but `Exception`."""
        try:
            if self._agent is None:
                self._agent = _new_agent(self._receives)
            return call(self._agent)
        except LaneError:
            raise
        except Exception as error:
            raise LaneError(f"NIXL: {error}") from error

    def _rested(self, size: int) -> NDArray[np.uint8]:
        now = time.monotonic()
        for item in self._resting:
            if now - item[0] >= _REST_S and item[1].size == size:
                self._resting.remove(item)
                return item[1]
        return np.empty(size, np.uint8)


class NixlSendLane:
    """`SendLane` through NIXL.

    Args:
        credit_bytes: of the stream. agent: the sender's. timeout_s: of a write. cores: affinity of the lane's thread.
        listener: hears that the lane is ready or has failed.
    """

    transport = "nixl"

    def __init__(
        self, credit_bytes: int, agent: NixlAgent, timeout_s: float, cores: tuple[int, ...], listener: LaneListener
    ) -> None:
        self._size = ring_bytes(credit_bytes)
        self._agent = agent
        self._timeout_s = timeout_s
        self._cores = cores
        self._listener = listener
        self._memory: _Memory | None = None
        self._loader: RingLoader | None = None
        self._inbox: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is announced once the lane is closed
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self) -> NixlWriter:
        memory = self._memory = self._agent.memory(self._size)
        self._loader = RingLoader(memory.data, RingSpace(self._size))
        return NixlWriter()

    def accepted(self, how: GroupStore | NixlStaging | None) -> None:
        if not isinstance(how, NixlStaging) or how.size != self._size:
            self._listener.on_failed(f"the receiver has no memory of {self._size} bytes")
            return
        with self._lock:
            if self._closed:
                return
            self._thread = threading.Thread(target=self._run, args=(how,), name="kv-lane-send", daemon=True)
        self._thread.start()

    def has_room(self, frame_bytes: int) -> bool:
        loader = self._loader
        return loader is not None and loader.has_room(frame_bytes)

    def load(self, frame: bytes) -> LoadedFrame | None:
        loader = self._loader
        return None if loader is None else loader.load(frame)

    def post(self, loaded: LoadedFrame, frame: LaneFrame, announce: Callable[[LaneFrame], None]) -> None:
        self._inbox.put(_Posted(frame._replace(offset=loaded.offset), announce))

    def unload(self, loaded: LoadedFrame) -> None:
        loader = self._loader
        if loader is not None:
            loader.unload(loaded)

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            unused = self._memory if self._thread is None else None
        self._inbox.put(None)
        if unused is not None and not closed:
            self._agent.rest(unused)

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, staging: NixlStaging) -> None:
        pin_thread(self._cores)
        try:
            peer = self._agent.meet(staging.agent)
            if not self._closed:
                self._listener.on_ready()
                self._write_all(staging, peer)
        except LaneError as error:
            self._failed(str(error))
        except Exception as error:
            logger.exception("a lane's thread failed", exc_info=wordless(error))
            self._failed(f"its thread failed: {type(error).__name__}")
        finally:
            if self._memory is not None:
                self._agent.rest(self._memory)

    def _failed(self, reason: str) -> None:
        if not self._closed:
            self._listener.on_failed(reason)

    def _write_all(self, staging: NixlStaging, peer: str) -> None:
        started: deque[tuple[_Posted, Any]] = deque()
        try:
            self._write(staging, peer, started)
        finally:
            for _, handle in started:
                with contextlib.suppress(LaneError):  # what has failed, or is of no interest any more
                    self._agent.release(handle)

    def _write(self, staging: NixlStaging, peer: str, started: deque[tuple[_Posted, Any]]) -> None:
        """Until the lane is closed. `started`: writes that have not ended well, the oldest first."""
        memory = self._memory
        assert memory is not None
        while True:
            if started and (len(started) == _DEPTH or self._inbox.empty()):
                posted, handle = started[0]
                self._wait(handle)
                started.popleft()
                self._agent.release(handle)
                with self._lock:
                    if not self._closed:
                        posted.announce(posted.frame)
                continue
            item = self._inbox.get()
            if item is None or self._closed:
                return
            frame = item.frame
            source = memory.data[frame.offset : frame.offset + frame.total]
            started.append((item, self._agent.write(source, staging.address + frame.offset, peer)))

    def _wait(self, handle: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._agent.done(handle):
            if time.monotonic() >= deadline:
                raise LaneError(f"NIXL: a write took more than {self._timeout_s} s")
            time.sleep(_POLL_S)


class NixlReceiveLane:
    """`ReceiveLane` through NIXL. It has no thread: a frame is here when it is announced.

    Args:
        credit_bytes: of the stream. agent: the receiver's. sink: hears of frames.
    """

    transport = "nixl"

    def __init__(self, credit_bytes: int, agent: NixlAgent, sink: FrameSink) -> None:
        self._size = ring_bytes(credit_bytes)
        self._agent = agent
        self._sink = sink
        self._lock = threading.Lock()
        self._memory: _Memory | None = None

    def accept(self) -> NixlStaging:
        memory = self._memory = self._agent.memory(self._size)
        return NixlStaging(self._agent.metadata(), memory.address, self._size)

    def expect(self, frame: ExpectedFrame) -> None:
        memory = self._memory
        if memory is None:
            self._sink.lost(frame)
        else:
            self._sink.arrived(frame, frame_bytes(memory.data, frame), shared=True)

    def close(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is not None:
            self._agent.rest(memory)

    def join(self, timeout_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Posted:
    """A frame to write and then to announce."""

    frame: LaneFrame
    announce: Callable[[LaneFrame], None]


def _new_agent(receives: bool) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(enable_prog_thread=receives, backends=["UCX"])
    return nixl_agent(secrets.token_hex(16), config)


def _region(data: NDArray[np.uint8]) -> tuple[int, int, int, str]:
    return int(data.ctypes.data), data.size, 0, ""


def _check(state: str) -> bool:
    """Whether a transfer is over. Raises `LaneError` if it failed."""
    if state not in ("DONE", "PROC"):
        raise LaneError(f"NIXL: a write ended as {state}")
    return state == "DONE"
