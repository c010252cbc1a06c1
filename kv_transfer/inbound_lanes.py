"""The lanes of one stream, as its receiver keeps them: every frame announced on one is answered, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.frames import HEADER_BYTES
from kv_transfer.lanes import ExpectedFrame, FrameSink, LaneError, ReceiveLane
from kv_transfer.manifest import TicketRef
from kv_transfer.messages import LaneAccept, LaneClose, LaneClosed, LaneDown, LaneFrame, LaneOpen, PushReply
from kv_transfer.negotiation import COLLECTIVE
from pdcore.errors import FrameError

logger = logging.getLogger(__name__)


class LaneHost(Protocol):
    """What the lanes of one stream need of the receiver. `reply` and the frames' ends may come from any thread."""

    def make(self, opening: LaneOpen, sink: FrameSink) -> ReceiveLane:
        """The receiver's end of a lane."""
        ...

    def room_for(self, ref: TicketRef) -> int:
        """A frame of this ticket begins: bytes that it may have; 0 if it is not wanted."""
        ...

    def credit_left(self) -> int:
        """Frame bytes that the sender may still have under way."""
        ...

    def frame_expected(self, total: int) -> None:
        """So many bytes are announced: they count as received until the frame is answered."""
        ...

    def frame_arrived(self, frame: ExpectedFrame, data: memoryview | None, shared: bool, lane: InboundLane) -> None:
        """An announced frame is here; see `FrameSink.arrived`. Once it is answered, so is `InboundLane.answered`
        called."""
        ...

    def frame_lost(self, frame: ExpectedFrame, reason: str) -> None:
        """An announced frame will not come: ask for it again."""
        ...

    def reply(self, reply: PushReply) -> None:
        """Say something to the sender."""
        ...


@dataclass(slots=True, eq=False)
class InboundLane:
    """One lane. It is `down` once it has failed or is being closed; `closing` once the sender has asked for its end.

    `open_frames`: announced and not answered. The sender hears `LaneClosed` when it is closing and there are none.
    """

    number: int
    transport: str
    host: LaneHost
    lane: ReceiveLane | None = None
    used_at: float = 0.0
    next_sequence: int = 0
    open_frames: int = 0
    down: str = ""
    closing: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def idle(self) -> bool:
        """Nothing is under way on it."""
        with self.lock:
            return self.open_frames == 0

    def answered(self) -> None:
        """One of its frames is answered, and its bytes let go."""
        with self.lock:
            self.open_frames -= 1
            over = self.closing and self.open_frames == 0
        if over:
            self.host.reply(LaneClosed(self.number))

    def take_down(self, reason: str) -> bool:
        """Use it no more; the sender is told, unless it asked. False if it was down already."""
        with self.lock:
            if self.down:
                return False
            self.down = reason
        logger.warning("lane %d (%s) is down: %s", self.number, self.transport, reason)
        self.host.reply(LaneDown(self.number, reason))
        return True

    def retire(self, reason: str) -> None:
        """Take it down though it works."""
        if self.take_down(reason) and self.lane is not None:
            self.lane.close()

    # --- FrameSink ------------------------------------------------------------------------------------------------

    def arrived(self, frame: ExpectedFrame, data: memoryview | None, *, shared: bool) -> None:
        self.host.frame_arrived(frame, data, shared, self)

    def lost(self, frame: ExpectedFrame) -> None:
        self.host.frame_lost(frame, f"lane {self.number} ({self.transport}): {self.down or 'closed'}")
        self.answered()

    def failed(self, reason: str) -> None:
        self.take_down(reason)


class InboundLanes:
    """The lanes of one stream. Called by the stream's reader.

    Args:
        host: the receiver, as this stream sees it.
        allowed: transports that were negotiated.
        admit: makes room for a lane of a kind that the receiver has only so many of; raises `LaneError` if it cannot.
    """

    def __init__(self, host: LaneHost, allowed: tuple[str, ...], admit: Callable[[InboundLane], None]) -> None:
        self._host = host
        self._allowed = allowed
        self._admit = admit
        self._lanes: dict[int, InboundLane] = {}

    def open(self, message: LaneOpen, now: float) -> None:
        """Open this end of a lane, and tell the sender how that went.

        Raises:
            FrameError: the sender breaks the protocol.
        """
        if message.transport not in self._allowed:
            raise FrameError(f"a lane of transport {message.transport}, which was not negotiated")
        if message.lane in self._lanes:
            raise FrameError(f"lane {message.lane} is opened twice")
        if any(other.transport == message.transport for other in self._lanes.values()):
            raise FrameError(f"a second lane of transport {message.transport}; the first one is not closed")
        entry = InboundLane(message.lane, message.transport, self._host, used_at=now)
        self._lanes[message.lane] = entry
        try:
            self._admit(entry)
            entry.lane = self._host.make(message, entry)
            how = entry.lane.accept()
        except LaneError as error:
            entry.take_down(str(error))
            return
        self._host.reply(LaneAccept(message.lane, how))

    def announced(self, message: LaneFrame, now: float) -> None:
        """A frame is on a lane, or about to be.

        Raises:
            FrameError: the sender breaks the protocol: no such lane, too many bytes, too few, or not on the lane.
        """
        entry = self._lanes.get(message.lane)
        if entry is None:
            raise FrameError(f"frame {message.frame_index} on lane {message.lane}, which is not open")
        total = message.total
        if total < HEADER_BYTES:
            raise FrameError(f"a frame of {total} bytes is shorter than its header of {HEADER_BYTES}")
        if total > (left := self._host.credit_left()):
            raise FrameError(f"a frame of {total} bytes with credit for {left}")
        frame = ExpectedFrame(
            ref=message.ref,
            frame_index=message.frame_index,
            total=total,
            sequence=message.sequence,
            offset=message.offset,
            wanted=total <= self._host.room_for(message.ref),
            announced_at=now,
        )
        self._host.frame_expected(total)
        with entry.lock:
            entry.open_frames += 1
        entry.used_at = now
        if message.sequence != entry.next_sequence:
            # What is between was lost: with a group, its bytes would be taken for this one's.
            entry.take_down(f"frame {message.sequence} announced where {entry.next_sequence} was due")
        entry.next_sequence = message.sequence + 1
        if entry.down or entry.lane is None:
            entry.lost(frame)
            return
        try:
            entry.lane.expect(frame)
        except FrameError:
            entry.lost(frame)
            raise

    def close(self, message: LaneClose) -> None:
        """The sender announces nothing more on a lane: let it go once its frames are answered."""
        entry = self._lanes.pop(message.lane, None)
        if entry is None:
            self._host.reply(LaneClosed(message.lane))
            return
        with entry.lock:
            entry.down = entry.down or f"closed by the sender: {message.reason}"
            entry.closing = True
            over = entry.open_frames == 0
        if entry.lane is not None:
            entry.lane.close()
        if over:
            self._host.reply(LaneClosed(message.lane))

    def drop(self, reason: str) -> None:
        """The stream is gone."""
        for entry in self._lanes.values():
            with entry.lock:
                entry.down = entry.down or reason
            if entry.lane is not None:
                entry.lane.close()
        self._lanes.clear()


class PairLimit:
    """Bounds how many process groups a receiver is in. Thread-safe.

    Args:
        max_pairs: that many. When one more is wanted, the idle one that was used longest ago is closed; its sender
            opens a new one when it needs it.
    """

    def __init__(self, max_pairs: int) -> None:
        self._max_pairs = max_pairs
        self._lock = threading.Lock()
        self._pairs: list[InboundLane] = []

    def admit(self, entry: InboundLane) -> None:
        """Count a lane that is being opened. Raises `LaneError` if there is no room for it."""
        if entry.transport != COLLECTIVE:
            return
        with self._lock:
            self._pairs = [pair for pair in self._pairs if not pair.down]
            if len(self._pairs) >= self._max_pairs:
                idle = min((pair for pair in self._pairs if pair.idle), key=lambda pair: pair.used_at, default=None)
                if idle is None:
                    raise LaneError(f"all of the {self._max_pairs} process groups of the receiver are in use")
                idle.retire("idle, and another pair needs its place")
                self._pairs.remove(idle)
            self._pairs.append(entry)
