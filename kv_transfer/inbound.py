"""One stream as the receiver sees it: its credit, the frames it brought, and the reader that takes its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.assembly import AssembledFrame, FrameAssembler
from kv_transfer.frames import FrameLimits
from kv_transfer.head_ranges import NO_HEADS, HeadRange
from kv_transfer.inbound_lanes import InboundLane, InboundLanes
from kv_transfer.lanes import ExpectedFrame, FrameSink, ReceiveLane
from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import (
    Abort,
    FrameNack,
    Hello,
    LaneClose,
    LaneFrame,
    LaneOpen,
    Piece,
    PushMessage,
    PushReply,
)
from kv_transfer.negotiation import GRPC, Site
from kv_transfer.receiving import Source
from kv_transfer.transport import PushStream
from pdcore.errors import FrameError


@dataclass(slots=True)
class ReceiverCounters:
    """What a receiver has seen since it started.

    Attributes:
        buffered_bytes: frame bytes received and not freed yet, over all streams. peak_buffered_bytes: their maximum.
        peak_stream_bytes: the maximum for any one stream; never above ``credit_bytes``.
        frames: frames scattered. rejected: damaged frames. commits, releases: ends of tickets.
        failed: releases of tickets that could not be filled; not of revoked ones.
    """

    buffered_bytes: int = 0
    peak_buffered_bytes: int = 0
    peak_stream_bytes: int = 0
    frames: int = 0
    rejected: int = 0
    commits: int = 0
    releases: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class InboundStream:
    """One stream from a sender.

    Attributes:
        welcomed, refused: how its hello was answered.
        heads, dtype: what its sender brings: the heads that both ends have, in the sender's type; nothing before the
            welcome.
        outstanding: frame bytes received, or announced on a lane, and not freed yet.
        lanes: opened beside it; None before the welcome.
    """

    number: int
    push: PushStream
    opened_at: float
    welcomed: bool = False
    refused: bool = False
    heads: HeadRange = NO_HEADS
    dtype: str = ""
    outstanding: int = 0
    lanes: InboundLanes | None = None

    @property
    def source(self) -> Source:
        """What tickets know it by."""
        return Source(self.number, self.heads)

    def limits(self, ticket: FrameLimits) -> FrameLimits:
        """What its frames must fit, of a ticket."""
        return ticket.narrowed(self.heads, self.dtype)


@dataclass(slots=True)
class FrameJob:
    """A frame for a receive thread. The frame is dropped from here before its credit goes back.

    Attributes:
        lane: that it came by; None for the stream itself.
        arrived_at: clock reading at its last byte.
        work_s: seconds that went into checking, decoding and writing it to the cache.
    """

    stream: InboundStream
    ref: TicketRef
    frame_index: int
    total: int
    frame: AssembledFrame | None
    lane: InboundLane | None
    arrived_at: float
    work_s: float = 0.0

    @property
    def transport(self) -> str:
        """How it came."""
        return GRPC if self.lane is None else self.lane.transport


class InboundHub(Protocol):
    """What a stream's reader tells the receiver."""

    def now(self) -> float:
        """Reading of the receiver's clock."""
        ...

    def hello_arrived(self, stream: InboundStream, hello: Hello) -> None:
        """Admit a sender, or end its stream naming what differs."""
        ...

    def room_for(self, stream: InboundStream, ref: TicketRef) -> int:
        """A frame of this ticket begins: bytes that it may have; 0 if it is not wanted."""
        ...

    def credit_left(self, stream: InboundStream) -> int:
        """Frame bytes that this sender may still have under way."""
        ...

    def bytes_arrived(self, stream: InboundStream, total: int) -> None:
        """A frame of so many bytes is here, or announced: they count until it is answered."""
        ...

    def bytes_freed(self, stream: InboundStream, total: int) -> None:
        """A frame that was counted will not become a job; its memory is free."""
        ...

    def frame_arrived(self, stream: InboundStream, frame: AssembledFrame, lane: InboundLane | None) -> None:
        """A whole frame is here, and counted. `lane`: that it came by; None for the stream itself."""
        ...

    def make_lane(self, opening: LaneOpen, sender: Site, sink: FrameSink) -> ReceiveLane:
        """The receiver's end of a lane from a sender at `sender`."""
        ...

    def manifest_arrived(self, stream: InboundStream, manifest: Manifest) -> None:
        """The sender of a ticket says that it is complete."""
        ...

    def abort_arrived(self, stream: InboundStream, abort: Abort) -> None:
        """The sender of a ticket gives up."""
        ...

    def stream_closed(self, stream: InboundStream, reason: str) -> None:
        """A stream is gone."""
        ...


class StreamReader:
    """`StreamListener` of one stream: checks the order of its messages and passes them on."""

    def __init__(self, hub: InboundHub, stream: InboundStream) -> None:
        self._hub = hub
        self._stream = stream
        self._assembler = FrameAssembler(lambda ref: hub.room_for(stream, ref), lambda: hub.credit_left(stream))

    def on_message(self, message: PushMessage) -> None:
        if self._stream.refused:
            return
        match message:
            case Hello():
                if self._stream.welcomed:
                    raise FrameError("a second hello")
                self._hub.hello_arrived(self._stream, message)
            case _ if not self._stream.welcomed:
                raise FrameError("the first message is not a hello")
            case Piece():
                frame = self._assembler.add(message, self._hub.now())
                if frame is not None:
                    self._hub.bytes_arrived(self._stream, frame.total)
                    self._hub.frame_arrived(self._stream, frame, None)
            case LaneFrame():
                self._lanes().announced(message, self._hub.now())
            case Manifest():
                self._hub.manifest_arrived(self._stream, message)
            case Abort():
                self._hub.abort_arrived(self._stream, message)
            case LaneOpen():
                self._lanes().open(message, self._hub.now())
            case LaneClose():
                self._lanes().close(message)

    def on_closed(self, reason: str) -> None:
        if self._stream.lanes is not None:
            self._stream.lanes.drop(reason)
        self._hub.stream_closed(self._stream, reason)

    def _lanes(self) -> InboundLanes:
        lanes = self._stream.lanes
        assert lanes is not None, "welcomed without lanes"
        return lanes


class StreamLaneHost:
    """`LaneHost` of one stream, whose sender sits at `site`."""

    def __init__(self, hub: InboundHub, stream: InboundStream, site: Site) -> None:
        self._hub = hub
        self._stream = stream
        self._site = site

    def make(self, opening: LaneOpen, sink: FrameSink) -> ReceiveLane:
        return self._hub.make_lane(opening, self._site, sink)

    def room_for(self, ref: TicketRef) -> int:
        return self._hub.room_for(self._stream, ref)

    def credit_left(self) -> int:
        return self._hub.credit_left(self._stream)

    def frame_expected(self, total: int) -> None:
        self._hub.bytes_arrived(self._stream, total)

    def frame_arrived(self, frame: ExpectedFrame, data: memoryview | None, shared: bool, lane: InboundLane) -> None:
        whole = AssembledFrame(frame.ref, frame.frame_index, frame.total, data, frame.announced_at, shared)
        self._hub.frame_arrived(self._stream, whole, lane)

    def frame_lost(self, frame: ExpectedFrame, reason: str) -> None:
        self._hub.bytes_freed(self._stream, frame.total)
        self.reply(FrameNack(frame.ref, frame.frame_index, frame.total, True, reason))

    def reply(self, reply: PushReply) -> None:
        self._stream.push.reply(reply)
