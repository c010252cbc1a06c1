"""What a push stream carries, free of any transport's encoding. Pure; `docs/kv-protocol.md` gives the meaning."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kv_transfer.manifest import Manifest, TicketRef
from pdcore.types import KvGeometry


class Hello(NamedTuple):
    """First message of the sender."""

    protocol_min: int
    protocol_max: int
    worker_id: str
    worker_incarnation: str
    receiver_incarnation: str
    geometry: KvGeometry


class Welcome(NamedTuple):
    """First message of the receiver. `credit_bytes`: frame bytes that may be unacknowledged on this stream."""

    protocol: int
    worker_incarnation: str
    geometry: KvGeometry
    codecs: tuple[str, ...]
    credit_bytes: int


class Piece(NamedTuple):
    """Bytes ``[offset, offset + len(data))`` of a frame of `total` bytes. `attempt` is 0 the first time."""

    ref: TicketRef
    frame_index: int
    attempt: int
    offset: int
    total: int
    data: bytes


class Abort(NamedTuple):
    """The sender gives up on a ticket."""

    ref: TicketRef
    reason: str


class FrameAck(NamedTuple):
    """The frame is in its blocks. `credit_bytes` are the sender's again."""

    ref: TicketRef
    frame_index: int
    credit_bytes: int


class FrameNack(NamedTuple):
    """The frame is not accepted. `credit_bytes` are the sender's again."""

    ref: TicketRef
    frame_index: int
    credit_bytes: int
    retryable: bool
    reason: str


class Committed(NamedTuple):
    """The ticket has become a sequence."""

    ref: TicketRef


class TicketRefused(NamedTuple):
    """The ticket is not, or no longer, to be filled."""

    ref: TicketRef
    reason: str


PushMessage: TypeAlias = Hello | Piece | Manifest | Abort
PushReply: TypeAlias = Welcome | FrameAck | FrameNack | Committed | TicketRefused
