"""One receiver as the sender sees it: the stream to it, its credit, its lanes, and the sends that it takes; and a
request's sends together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kv_transfer.choosing import Chosen, Forecast
from kv_transfer.codecs.base import Codec
from kv_transfer.frames import FrameLimits
from kv_transfer.lane_board import FrameName, LaneBoard, OutboundLane
from kv_transfer.manifest import TicketRef
from kv_transfer.negotiation import LeftOut
from kv_transfer.session import FrameTask, SendFailure, SendSession
from kv_transfer.transport import PushLink, SendOutcome
from pdcore.costs import ASKED_FOR
from pdcore.types import RequestKey


@dataclass(slots=True, eq=False)
class Peer:
    """A receiver's process: an address and an incarnation.

    Attributes:
        link: the stream; None once it is gone.
        opened_at: clock reading when the link was made. heard_at: at its last reply.
        window: credit when nothing is under way, as the receiver's welcome says; 0 before it.
        credit: frame bytes that may be sent now.
        unanswered: the frames that were sent and not answered, the oldest first: each one's bytes, and when it was.
        sends: the sends under way, by their ticket.
        board: the lanes beside the stream. left_out: the transports that cannot be used, and why.
    """

    address: str
    incarnation: str
    opened_at: float
    heard_at: float
    link: PushLink | None = None
    window: int = 0
    credit: int = 0
    unanswered: dict[FrameName, tuple[int, float]] = field(default_factory=dict)
    sends: dict[TicketRef, Send] = field(default_factory=dict)
    board: LaneBoard = field(default_factory=LaneBoard)
    left_out: tuple[LeftOut, ...] = ()

    @property
    def ready(self) -> bool:
        """Frames may be sent."""
        return self.link is not None and self.window > 0 and self.board.settled


@dataclass(slots=True, eq=False)
class Delivery:
    """A request's KV on its way: one send for each endpoint of its ticket, and what becomes of them together.

    Attributes:
        on_done: gets the one outcome. open: sends that are not over. failure: the first one.
    """

    key: RequestKey
    on_done: Callable[[SendOutcome], None]
    opened_at: float
    sends: tuple[Send, ...] = ()
    open: int = 0
    failure: SendFailure | None = None

    def ended(self, failure: SendFailure | None) -> bool:
        """One of the sends is over. True if it was the last one."""
        self.open -= 1
        self.failure = self.failure or failure
        return self.open == 0


@dataclass(slots=True, eq=False)
class Send:
    """One send: the state machine and what it takes to serve it.

    Attributes:
        delivery: that it is a part of.
        asked: a codec's plain name, or ``auto``. chosen: what came of it, before the first frame; may be chosen anew
            while it is not final.
        chunk: tokens that the running step computes, and clock reading when it began; None between steps.
        finished_at: clock reading when its prefill was over; None before.
        forecast: what was made of the whole of it before its first frame: what comes of it shows how good that was.
        began_with: plain name of the codec of its first frame. asked_by: who asked for `asked`, for people.
        reconnected: it has been moved to a new stream.
    """

    delivery: Delivery
    session: SendSession
    limits: FrameLimits
    asked: str
    asked_by: str
    block_ids: tuple[int, ...]
    peer: Peer
    chosen: Chosen | None = None
    chunk: tuple[int, float] | None = None
    finished_at: float | None = None
    forecast: Forecast | None = None
    began_with: str = ""
    reconnected: bool = False

    @property
    def codec_reason(self) -> str:
        """Why its codec was chosen, for people."""
        assert self.chosen is not None, "it has sent nothing"
        reason = self.chosen.reason
        if reason == ASKED_FOR:
            return f"{reason} by {self.asked_by}"
        return reason if self.began_with == self.chosen.codec.name else f"began with {self.began_with}; {reason}"

    @property
    def key(self) -> RequestKey:
        """The request's."""
        return self.delivery.key

    def hidden_s(self, seconds_per_token: float | None, now: float) -> float:
        """Seconds until its prefill has computed the last token, by the pace of the prefills before it."""
        planner = self.session.planner
        if seconds_per_token is None:
            return 0.0
        elapsed = 0.0 if self.chunk is None else now - self.chunk[1]
        return max(0.0, (planner.token_end - planner.computed) * seconds_per_token - elapsed)


def next_attempt(session: SendSession) -> int:
    """The try of the frame that `SendSession.take_frame` would hand out."""
    return session.attempts[session.retry[0]] if session.retry else 0


class FrameTurn(NamedTuple):
    """A frame whose turn it is.

    `reserved`: its credit, the most that it can take. `lane`: how it goes; None for the stream itself.
    """

    send: Send
    task: FrameTask
    reserved: int
    lane: OutboundLane | None
    codec: Codec


@dataclass(slots=True)
class LaneCounters:
    """What a sender has done over one transport since it started.

    Attributes:
        frames: frames sent. frame_bytes: their bytes.
        opened: lanes that became ready. failures: lanes that could not be opened, or broke.
        downgrades: lanes that broke while they were the best there was.
        moved_frames: frames that were under way on such a lane and were sent again another way.
    """

    frames: int = 0
    frame_bytes: int = 0
    opened: int = 0
    failures: int = 0
    downgrades: int = 0
    moved_frames: int = 0


@dataclass(slots=True)
class CodecCounters:
    """What a sender has packed with one codec since it started: `raw_bytes` into `wire_bytes`."""

    raw_bytes: int = 0
    wire_bytes: int = 0


@dataclass(slots=True)
class SenderCounters:
    """What a sender has done since it started.

    Attributes:
        unacked_bytes: frame bytes sent and not answered yet, over all streams. peak_unacked_bytes: their maximum.
        frames: frames sent. wire_bytes: their bytes. retries: frames sent again.
        failed: requests whose KV did not arrive, for other reasons than an abort or a revoked ticket.
        links: streams opened. lanes: more, by transport; the stream itself is ``grpc``. codecs: more, by codec.
    """

    unacked_bytes: int = 0
    peak_unacked_bytes: int = 0
    frames: int = 0
    wire_bytes: int = 0
    retries: int = 0
    failed: int = 0
    links: int = 0
    lanes: dict[str, LaneCounters] = field(default_factory=dict)
    codecs: dict[str, CodecCounters] = field(default_factory=dict)

    def lane(self, transport: str) -> LaneCounters:
        """The counters of one transport."""
        return self.lanes.setdefault(transport, LaneCounters())

    def copy(self) -> SenderCounters:
        """As they are now."""
        return replace(
            self,
            lanes={name: replace(lane) for name, lane in self.lanes.items()},
            codecs={name: replace(codec) for name, codec in self.codecs.items()},
        )
