"""Frames through torch.distributed: a process group of the two workers, one thread at each end.

The receiver hosts the store at which they meet. A frame is announced first, with its length; then both ends post it,
in the order of the announcements, a few at a time so that neither waits for the other's scheduler at every frame.
Groups run on Gloo, or on NCCL between two GPUs: there frames pass through a GPU buffer on the lane's own stream.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kv_transfer.lanes import ExpectedFrame, FrameSink, LaneError, LaneListener, LoadedFrame
from kv_transfer.messages import GroupStore, LaneFrame, NixlStaging, ProcessGroupOpening
from kv_transfer.staging import copy_bytes
from kv_transfer.threads import pin_thread
from kv_transfer.transports.process_group import RECEIVER, SENDER, PairGroup, host_store, reach_store
from pdcore.tracebacks import wordless

logger = logging.getLogger(__name__)

_DEPTH: Final = 8  # operations posted and not waited for
_TAG_MASK: Final = 0x7FFF_FFFF


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the groups of one worker have in common.

    Attributes:
        address: numeric address that stores and Gloo bind to.
        device: where this worker's KV cache lives.
        timeout_s: of meeting, and of every operation.
        cores: affinity of the lanes' threads; empty leaves them free.
    """

    address: str
    device: torch.device
    timeout_s: float
    cores: tuple[int, ...] = ()

    def group_device(self, backend: str) -> torch.device:
        """Where the tensors of a group's operations live. Raises `LaneError` if NCCL is asked of a CPU."""
        if backend == "nccl" and self.device.type != "cuda":
            raise LaneError("the peer wants NCCL, and this end's cache is not on a GPU")
        return self.device if backend == "nccl" else torch.device("cpu")


class StoreHost:
    """The store at which a receiver's groups meet; made when it is first asked for.

    A group leaves a few hundred bytes of keys there. Groups are made as often as workers meet or lanes fail, so that
    does not add up.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._store: Any = None

    def meeting_point(self, backend: str) -> GroupStore:
        """Where the next group, of `backend`, meets. Raises `LaneError`."""
        settings = self._settings
        with self._lock:
            if self._store is None:
                self._store = host_store(settings.address, settings.timeout_s)
            return GroupStore(settings.address, self._store.port, secrets.token_hex(16), backend)

    def close(self) -> None:
        with self._lock:
            self._store = None


class CollectiveSendLane:
    """`SendLane` through a process group.

    Args:
        settings: the worker's. listener: hears that the lane is ready or has failed.
    """

    transport = "collective"

    def __init__(self, settings: GroupSettings, listener: LaneListener) -> None:
        self._settings = settings
        self._listener = listener
        self._inbox: queue.SimpleQueue[tuple[LoadedFrame, int] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._group: PairGroup | None = None
        self._thread: threading.Thread | None = None

    def offer(self) -> ProcessGroupOpening:
        return ProcessGroupOpening()

    def accepted(self, how: GroupStore | NixlStaging | None) -> None:
        if not isinstance(how, GroupStore):
            self._listener.on_failed("the receiver names no store")
            return
        self._thread = threading.Thread(target=self._run, args=(how,), name="kv-lane-send", daemon=True)
        self._thread.start()

    def has_room(self, frame_bytes: int) -> bool:
        return True  # the stream's credit bounds what waits here

    def load(self, frame: bytes) -> LoadedFrame | None:
        return LoadedFrame(len(frame), 0, frame)

    def post(self, loaded: LoadedFrame, frame: LaneFrame, announce: Callable[[LaneFrame], None]) -> None:
        # Announced before anything is posted, and in the order of the posts: the caller's lock sees to that.
        announce(frame)
        self._inbox.put((loaded, frame.sequence & _TAG_MASK))

    def unload(self, loaded: LoadedFrame) -> None:
        loaded.data = None

    def close(self) -> None:
        self._closed.set()
        self._inbox.put(None)
        group = self._group
        if group is not None:
            group.abort()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, meeting: GroupStore) -> None:
        settings = self._settings
        pin_thread(settings.cores)
        try:
            group = self._group = PairGroup(
                reach_store(meeting.host, meeting.port, settings.timeout_s),
                meeting.prefix,
                SENDER,
                backend=meeting.backend,
                address=settings.address,
                device=settings.group_device(meeting.backend),
                timeout_s=settings.timeout_s,
            )
            if not self._closed.is_set():
                self._listener.on_ready()
                self._send_all(group)
        except LaneError as error:
            self._failed(str(error))
        except Exception as error:
            logger.exception("a lane's thread failed", exc_info=wordless(error))
            self._failed(f"its thread failed: {type(error).__name__}")
        finally:
            if self._group is not None:
                self._group.abort()

    def _failed(self, reason: str) -> None:
        if not self._closed.is_set():
            self._listener.on_failed(reason)

    def _send_all(self, group: PairGroup) -> None:
        posted: deque[tuple[Any, torch.Tensor]] = deque()
        while True:
            if posted and (len(posted) == _DEPTH or self._inbox.empty()):
                group.wait(posted[0][0])
                posted.popleft()
                continue
            item = self._inbox.get()
            if item is None:
                return
            loaded, tag = item
            data, loaded.data = loaded.data, None
            if data is not None:
                tensor = _to_device(data, group)
                posted.append((group.send(tensor, tag), tensor))


class CollectiveReceiveLane:
    """`ReceiveLane` through a process group.

    Args:
        backend: ``gloo`` or ``nccl``. settings: the worker's. store: where its groups meet. sink: hears of frames.
    """

    transport = "collective"

    def __init__(self, backend: str, settings: GroupSettings, store: StoreHost, sink: FrameSink) -> None:
        self._backend = backend
        self._settings = settings
        self._store = store
        self._sink = sink
        self._inbox: queue.SimpleQueue[ExpectedFrame | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False  # nothing is put into the inbox any more
        self._closed = threading.Event()
        self._group: PairGroup | None = None
        self._thread: threading.Thread | None = None

    def accept(self) -> GroupStore:
        meeting = self._store.meeting_point(self._backend)
        self._thread = threading.Thread(target=self._run, args=(meeting,), name="kv-lane-receive", daemon=True)
        self._thread.start()
        return meeting

    def expect(self, frame: ExpectedFrame) -> None:
        with self._lock:
            over = self._over
            if not over:
                self._inbox.put(frame)
        if over:
            self._sink.lost(frame)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._over = True
            self._inbox.put(None)
        group = self._group
        if group is not None:
            group.abort()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, meeting: GroupStore) -> None:
        settings = self._settings
        pin_thread(settings.cores)
        posted: deque[_Receiving] = deque()
        try:
            group = self._group = PairGroup(
                reach_store(meeting.host, meeting.port, settings.timeout_s),
                meeting.prefix,
                RECEIVER,
                backend=meeting.backend,
                address=settings.address,
                device=settings.group_device(meeting.backend),
                timeout_s=settings.timeout_s,
            )
            self._receive_all(group, posted)
        except LaneError as error:
            self._failed(str(error))
        except Exception as error:
            logger.exception("a lane's thread failed", exc_info=wordless(error))
            self._failed(f"its thread failed: {type(error).__name__}")
        finally:
            self._give_up(posted)

    def _failed(self, reason: str) -> None:
        if not self._closed.is_set():
            self._sink.failed(reason)

    def _receive_all(self, group: PairGroup, posted: deque[_Receiving]) -> None:
        while not self._closed.is_set():
            if posted and (len(posted) == _DEPTH or self._inbox.empty()):
                receiving = posted[0]
                group.wait(receiving.work)
                data = _to_host(receiving, group)
                posted.popleft()
                self._sink.arrived(receiving.frame, data if receiving.frame.wanted else None, shared=False)
                continue
            frame = self._inbox.get()
            if frame is None:
                return
            receiving = _Receiving(frame)
            posted.append(receiving)  # before anything can fail: it is answered, whatever becomes of the lane
            # Its length was checked against the credit when it was announced.
            receiving.tensor = torch.from_numpy(np.empty(frame.total, np.uint8)).to(group.device)
            receiving.work = group.receive(receiving.tensor, frame.sequence & _TAG_MASK)

    def _give_up(self, posted: deque[_Receiving]) -> None:
        """End the group, then say what is lost with it: a receive that is posted may write until then."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            del group
        with self._lock:
            self._over = True
            self._inbox.put(None)
        lost = [receiving.frame for receiving in posted]
        while (frame := self._inbox.get()) is not None:
            lost.append(frame)
        for frame in lost:
            self._sink.lost(frame)


@dataclass(slots=True)
class _Receiving:
    """A receive that is posted, or about to be. `tensor`: bytes on the group's device."""

    frame: ExpectedFrame
    tensor: torch.Tensor | None = None
    work: Any = None


def _to_device(data: bytes, group: PairGroup) -> torch.Tensor:
    # A copy: torch takes no read-only memory, and warns of it.
    staged = np.empty(len(data), np.uint8)
    copy_bytes(data, staged)
    with group.on_stream():
        return torch.from_numpy(staged).to(group.device)


def _to_host(receiving: _Receiving, group: PairGroup) -> memoryview:
    assert receiving.tensor is not None, "posted"
    with group.on_stream():
        return receiving.tensor.cpu().numpy().data
