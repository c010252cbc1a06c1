"""One stream as the receiver sees it: its credit, the frames it brought, and the reader that takes its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.assembly import AssembledFrame, FrameAssembler
from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import Abort, Hello, Piece, PushMessage
from kv_transfer.transport import PushStream
from pdcore.errors import FrameError


@dataclass(slots=True)
class ReceiverCounters:
    """What a receiver has seen since it started.

    Attributes:
        buffered_bytes: frame bytes received and not freed yet, over all streams. peak_buffered_bytes: their maximum.
        peak_stream_bytes: the maximum for any one stream; never above ``credit_bytes``.
        frames: frames scattered. rejected: frames not accepted. commits, releases: ends of tickets.
    """

    buffered_bytes: int = 0
    peak_buffered_bytes: int = 0
    peak_stream_bytes: int = 0
    frames: int = 0
    rejected: int = 0
    commits: int = 0
    releases: int = 0


@dataclass(slots=True, eq=False)
class InboundStream:
    """One stream from a sender. `outstanding`: frame bytes received and not freed yet."""

    number: int
    push: PushStream
    opened_at: float
    welcomed: bool = False
    refused: bool = False
    outstanding: int = 0


@dataclass(slots=True)
class FrameJob:
    """A frame for a receive thread. The frame is dropped from here before its credit goes back."""

    stream: InboundStream
    ref: TicketRef
    frame_index: int
    total: int
    frame: AssembledFrame | None


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

    def frame_arrived(self, stream: InboundStream, frame: AssembledFrame) -> None:
        """A whole frame is here."""
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
                    self._hub.frame_arrived(self._stream, frame)
            case Manifest():
                self._hub.manifest_arrived(self._stream, message)
            case Abort():
                self._hub.abort_arrived(self._stream, message)

    def on_closed(self, reason: str) -> None:
        self._hub.stream_closed(self._stream, reason)
