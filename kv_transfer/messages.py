"""What a push stream carries, free of any transport's encoding. Pure; `docs/kv-protocol.md` gives the meaning."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.negotiation import Negotiation, Offer
from pdcore.types import KvGeometry


class Hello(NamedTuple):
    """First message of the sender."""

    protocol_min: int
    protocol_max: int
    worker_id: str
    worker_incarnation: str
    receiver_incarnation: str
    geometry: KvGeometry
    offer: Offer


class Welcome(NamedTuple):
    """First message of the receiver.

    `credit_bytes`: frame bytes that may be unacknowledged on this stream. `decode_rates`: what the receiver knows of
    its codecs, as (plain name, decoded bytes per second).
    """

    protocol: int
    worker_incarnation: str
    geometry: KvGeometry
    codecs: tuple[str, ...]
    credit_bytes: int
    negotiation: Negotiation
    decode_rates: tuple[tuple[str, float], ...] = ()


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


class ShmRing(NamedTuple):
    """A ring in shared memory, held open by process `pid` as `fd`: a page that begins with a magic number and
    `nonce`, then `size` bytes."""

    pid: int
    fd: int
    size: int
    nonce: bytes


class ProcessGroupOpening(NamedTuple):
    """A process group of the two ends, the receiver as rank 0."""


class NixlWriter(NamedTuple):
    """The sender would write, through NIXL, into memory of the receiver."""


class LaneOpen(NamedTuple):
    """The sender would like to open lane number `lane`, never used before on this stream."""

    lane: int
    how: ShmRing | ProcessGroupOpening | NixlWriter

    @property
    def transport(self) -> str:
        """What kind of lane it is."""
        match self.how:
            case ShmRing():
                return "shm"
            case ProcessGroupOpening():
                return "collective"
            case NixlWriter():
                return "nixl"


class LaneFrame(NamedTuple):
    """A frame of `total` bytes is on a lane or about to be. `attempt` as in `Piece`.

    `sequence` counts the lane's frames from 0. `offset`: where the frame begins in a ring or in staging memory.
    """

    ref: TicketRef
    frame_index: int
    attempt: int
    total: int
    lane: int
    sequence: int
    offset: int


class LaneClose(NamedTuple):
    """The sender announces nothing more on a lane."""

    lane: int
    reason: str


class GroupStore(NamedTuple):
    """Where the members of a process group find each other: a store. `prefix`: of this group's keys. `backend`: what
    the group runs on, ``gloo`` or ``nccl``."""

    host: str
    port: int
    prefix: str
    backend: str


class NixlStaging(NamedTuple):
    """Memory of the receiver that the sender may write frames into. `agent`: metadata of the receiver's agent."""

    agent: bytes
    address: int
    size: int


class LaneAccept(NamedTuple):
    """The receiver has opened its end of a lane. `how`: what the sender needs to know of it."""

    lane: int
    how: GroupStore | NixlStaging | None


class LaneDown(NamedTuple):
    """The receiver can use a lane no more; the sender is to close it."""

    lane: int
    reason: str


class LaneClosed(NamedTuple):
    """Every frame that was announced on the lane is answered, and nothing reads it any more."""

    lane: int


class FrameAck(NamedTuple):
    """The frame is in its blocks. `credit_bytes` are the sender's again.

    `held_s`: seconds from its last byte to this answer. `work_s`: of them, those that went into checking, decoding
    and writing it to the cache.
    """

    ref: TicketRef
    frame_index: int
    credit_bytes: int
    held_s: float = 0.0
    work_s: float = 0.0


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


class Revocation(str):
    """A reason for refusing a ticket that is nobody's fault: its owner has taken it back, for a request that is over
    or because it needs the memory."""

    __slots__ = ()


class TicketRefused(NamedTuple):
    """The ticket is not, or no longer, to be filled. The reason may be a `Revocation`."""

    ref: TicketRef
    reason: str


PushMessage: TypeAlias = Hello | Piece | Manifest | Abort | LaneOpen | LaneFrame | LaneClose
PushReply: TypeAlias = Welcome | FrameAck | FrameNack | Committed | TicketRefused | LaneAccept | LaneDown | LaneClosed
