"""The faces of a lane: a way for the bytes of frames beside the push stream, which announces them.

A lane has two ends, made by `kv_transfer.transports.catalog`::

    sender                                     receiver
      SendLane                                   ReceiveLane
      offer            -- LaneOpen ------------>
                       <------------ LaneAccept   accept
      accepted, then `LaneListener.on_ready`
      load                (bytes into place)
      post             -- LaneFrame ----------->  expect, then `FrameSink.arrived`
                       <---------- Ack or Nack
      unload              (the place is free)
      close            -- LaneClose ----------->  close
                       <------------ LaneClosed

Every frame that is announced is answered, whatever becomes of the lane: by the host of the receive lane if its bytes
did not come. A lane fails as a whole; its frames then travel another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.manifest import TicketRef
from kv_transfer.messages import (
    GroupStore,
    LaneFrame,
    NixlStaging,
    NixlWriter,
    ProcessGroupOpening,
    ShmRing,
)
from pdcore.errors import TransferError


class LaneError(TransferError):
    """A lane cannot be opened or used; another one can."""


@dataclass(slots=True, eq=False)
class LoadedFrame:
    """A frame that a send lane has taken in.

    Attributes:
        total: its length in bytes.
        offset: where it lies in the lane's memory; 0 for a lane without.
        data: its bytes, for a lane that takes them from there; None once they are in the lane's memory.
    """

    total: int
    offset: int
    data: bytes | None


class LaneListener(Protocol):
    """Who hears from a `SendLane`. Called from the lane's own thread, or from within `accepted`."""

    def on_ready(self) -> None:
        """Frames may be posted."""
        ...

    def on_failed(self, reason: str) -> None:
        """The lane can be used no more; told once, and not after `close`."""
        ...


class SendLane(Protocol):
    """The sender's end of one lane.

    One thread at a time loads; `post`, `unload` and `close` may be called from any thread, and return at once.
    """

    transport: str

    def offer(self) -> ShmRing | ProcessGroupOpening | NixlWriter:
        """Prepare this end; returns what `LaneOpen` tells the receiver. Raises `LaneError`."""
        ...

    def accepted(self, how: GroupStore | NixlStaging | None) -> None:
        """The receiver has opened its end. Returns at once; the listener hears how it goes on."""
        ...

    def has_room(self, frame_bytes: int) -> bool:
        """A frame of at most this many bytes can be loaded now."""
        ...

    def load(self, frame: bytes) -> LoadedFrame | None:
        """Bring a frame's bytes where the lane sends them from; None if there is no room. May copy."""
        ...

    def post(self, loaded: LoadedFrame, frame: LaneFrame, announce: Callable[[LaneFrame], None]) -> None:
        """Send a loaded frame. `announce` is called with `frame`, here or from the lane's thread, when the receiver
        may hear of it. Does nothing once the lane is closed or has failed."""
        ...

    def unload(self, loaded: LoadedFrame) -> None:
        """The frame's bytes are needed no more: it was answered, or never posted."""
        ...

    def close(self) -> None:
        """Use the lane no more. What it holds is freed when its last user is gone. Idempotent."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for the lane's thread, if it has one, after `close`."""
        ...


@dataclass(frozen=True, slots=True)
class ExpectedFrame:
    """A frame that was announced on a lane.

    Attributes:
        ref, frame_index, total: what the announcement says it is. sequence, offset: and where.
        wanted: a ticket takes it; else its bytes are dropped.
        announced_at: clock reading.
    """

    ref: TicketRef
    frame_index: int
    total: int
    sequence: int
    offset: int
    wanted: bool
    announced_at: float


class FrameSink(Protocol):
    """Who hears from a `ReceiveLane`: from within `expect`, or from the lane's own thread."""

    def arrived(self, frame: ExpectedFrame, data: memoryview | None, *, shared: bool) -> None:
        """The bytes of a frame are here; None if it was not wanted. `shared`: the sender can still write to them, so
        that what is read twice may differ. They must be let go before the frame is answered."""
        ...

    def lost(self, frame: ExpectedFrame) -> None:
        """The bytes of a frame will not come."""
        ...

    def failed(self, reason: str) -> None:
        """The lane can be used no more; told once, before the frames that are lost with it, and not after `close`."""
        ...


class ReceiveLane(Protocol):
    """The receiver's end of one lane. `accept` and `expect` are called by the stream's reader."""

    transport: str

    def accept(self) -> GroupStore | NixlStaging | None:
        """Open this end; returns what `LaneAccept` tells the sender. Raises `LaneError`. Must not wait for it."""
        ...

    def expect(self, frame: ExpectedFrame) -> None:
        """A frame was announced; the sink hears of it once. Frames are announced in order. Returns at once.

        Raises `FrameError` if the frame cannot be on the lane: the sender breaks the protocol.
        """
        ...

    def close(self) -> None:
        """Take nothing more; the sink hears of every frame not taken yet that it is lost. Idempotent."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for the lane's thread, if it has one, after `close`."""
        ...
