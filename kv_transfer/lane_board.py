"""The lanes to one receiver, as its sender keeps them: which is open, which is next, what is under way on each.

Pure but for the `SendLane` objects that it holds and does not call. `kv_transfer.peers.PeerTable` feeds it and does
what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kv_transfer.lanes import LoadedFrame, SendLane
from kv_transfer.manifest import TicketRef
from kv_transfer.negotiation import GRPC

_RETRY_S: Final = 1.0  # after a lane's first failure; doubled by each further one
_MAX_RETRY_S: Final = 300.0


class LaneState(StrEnum):
    """See `OutboundLane`."""

    OPENING = "opening"
    READY = "ready"
    CLOSING = "closing"


class FrameName(NamedTuple):
    """Which frame of which ticket."""

    ref: TicketRef
    frame_index: int


class UnderWay(NamedTuple):
    """A frame that is sent and not answered. `sent_at`: clock reading."""

    loaded: LoadedFrame
    sent_at: float


@dataclass(slots=True, eq=False)
class OutboundLane:
    """One lane.

    ::

                  accepted, built              failed, or nothing heard in time       every frame answered
        OPENING -------------------> READY --------------------------------> CLOSING ----------------------> (gone)
           |                                       (LaneClose)                 ^         (LaneClosed)
           '-------------------------------------------------------------------'

    Attributes:
        number: its name on the stream.
        opened_at: clock reading when it was asked for. used_at: when it last carried a frame, or became ready.
        heard_at: when one of its frames was last answered. closing_at: when it was given up.
        sequence: of the next frame.
        under_way: frames that are not answered, oldest first.
    """

    number: int
    transport: str
    lane: SendLane
    opened_at: float
    used_at: float
    heard_at: float = 0.0
    closing_at: float = 0.0
    state: LaneState = LaneState.OPENING
    sequence: int = 0
    under_way: dict[FrameName, UnderWay] = field(default_factory=dict)

    def silent_since(self) -> float | None:
        """Since when an answer is waited for; None if none is due."""
        match self.state:
            case LaneState.OPENING:
                return self.opened_at
            case LaneState.READY:
                oldest = next(iter(self.under_way.values()), None)
                return None if oldest is None else max(oldest.sent_at, self.heard_at)
            case LaneState.CLOSING:
                return self.closing_at


class LaneBoard:
    """All lanes of one stream. Used under the sender's lock.

    The best transport is opened first, then the next if it fails; one that has failed is tried again after a pause,
    which grows. The stream itself, `GRPC`, is last and never listed here.

    Args:
        transports: as negotiated, best first.
        patient_until: clock reading from which frames go on the stream, whatever may still be opening.
    """

    def __init__(self, transports: tuple[str, ...] = (GRPC,), patient_until: float = 0.0) -> None:
        self._order = tuple(name for name in transports if name != GRPC)
        self._lanes: dict[int, OutboundLane] = {}
        self._numbers = 0
        self._failures = dict.fromkeys(self._order, 0)
        self._retry_at = dict.fromkeys(self._order, 0.0)
        self._untried = set(self._order)
        self._patient_until = patient_until
        self.settled = not self._order
        """Frames need not wait for a lane: one is ready, each has been tried, or it took too long. It stays so."""

    def __iter__(self) -> Iterator[OutboundLane]:
        return iter(tuple(self._lanes.values()))

    # --- opening --------------------------------------------------------------------------------------------------

    def due(self, now: float) -> str | None:
        """The transport to open now: the best one, unless it is there, on its way, or failed a short while ago."""
        if now >= self._patient_until:
            self.settled = True
        states = {lane.transport: lane.state for lane in self._lanes.values()}
        for transport in self._order:
            match states.get(transport):
                case None if now >= self._retry_at[transport]:
                    return transport
                case LaneState.OPENING | LaneState.READY:
                    return None
        return None

    def opening(self, transport: str, lane: SendLane, now: float) -> OutboundLane:
        """A lane is asked for."""
        opened = OutboundLane(self._numbers, transport, lane, opened_at=now, used_at=now)
        self._numbers += 1
        self._lanes[opened.number] = opened
        return opened

    def not_opened(self, transport: str, now: float) -> None:
        """This end of a lane could not be made."""
        self._failed(transport, now)

    def postponed(self, transport: str, now: float) -> None:
        """There is no room for a lane of this kind at present. Not its fault: it will be asked again before long."""
        self._retry_at[transport] = now + _RETRY_S
        self._tried(transport)

    def find(self, number: int) -> OutboundLane | None:
        """The lane of a number."""
        return self._lanes.get(number)

    def ready(self, lane: OutboundLane, now: float) -> None:
        """Frames may be posted. Nothing changes if the lane has failed meanwhile."""
        if lane.state is LaneState.OPENING:
            lane.state = LaneState.READY
            lane.used_at = now
            self.settled = True

    # --- ending ---------------------------------------------------------------------------------------------------

    def fail(self, lane: OutboundLane, now: float) -> bool:
        """A lane can be used no more. False if that was known."""
        if lane.state is LaneState.CLOSING:
            return False
        lane.state = LaneState.CLOSING
        lane.closing_at = now
        self._failed(lane.transport, now)
        return True

    def retire(self, lane: OutboundLane, now: float) -> None:
        """An idle lane makes room for another one's."""
        lane.state = LaneState.CLOSING
        lane.closing_at = now

    def closed(self, lane: OutboundLane) -> dict[FrameName, UnderWay]:
        """The receiver has answered every frame that it heard of. Returns those that it did not hear of."""
        del self._lanes[lane.number]
        return lane.under_way

    # --- frames ---------------------------------------------------------------------------------------------------

    def pick(self) -> OutboundLane | None:
        """The lane that the next frame should take; None for the stream."""
        ready = (lane for lane in self._lanes.values() if lane.state is LaneState.READY)
        return min(ready, key=lambda lane: self._order.index(lane.transport), default=None)

    def sent(self, lane: OutboundLane, name: FrameName, loaded: LoadedFrame, now: float) -> None:
        """A frame is on its way."""
        lane.under_way[name] = UnderWay(loaded, now)
        lane.sequence += 1
        lane.used_at = now

    def answered(self, name: FrameName, now: float) -> tuple[OutboundLane, LoadedFrame] | None:
        """A frame is answered: the lane that it took, and what may be unloaded. None if it came on the stream."""
        for lane in self._lanes.values():
            frame = lane.under_way.pop(name, None)
            if frame is not None:
                lane.heard_at = now
                if lane.state is LaneState.READY:
                    self._failures[lane.transport] = 0
                return lane, frame.loaded
        return None

    # --- inner steps ----------------------------------------------------------------------------------------------

    def _failed(self, transport: str, now: float) -> None:
        pause = min(_RETRY_S * 2 ** self._failures[transport], _MAX_RETRY_S)
        self._failures[transport] += 1
        self._retry_at[transport] = now + pause
        self._tried(transport)

    def _tried(self, transport: str) -> None:
        self._untried.discard(transport)
        if not self._untried:
            self.settled = True
