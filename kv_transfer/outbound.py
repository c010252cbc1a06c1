"""One receiver as the sender sees it: the stream to it, its credit, and the sends that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.codecs.base import Codec
from kv_transfer.frames import FrameLimits
from kv_transfer.manifest import TicketRef
from kv_transfer.session import SendSession
from kv_transfer.transport import PushLink, SendOutcome
from pdcore.types import RequestKey


@dataclass(slots=True, eq=False)
class Peer:
    """A receiver's process: an address and an incarnation.

    Attributes:
        link: the stream; None once it is gone.
        opened_at: clock reading when the link was made. heard_at: at its last reply.
        window: credit when nothing is under way, as the receiver's welcome says; 0 before it.
        credit: frame bytes that may be sent now.
        sends: the sends under way, by their ticket.
    """

    address: str
    incarnation: str
    opened_at: float
    heard_at: float
    link: PushLink | None = None
    window: int = 0
    credit: int = 0
    sends: dict[TicketRef, Send] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Frames may be sent."""
        return self.link is not None and self.window > 0


@dataclass(slots=True, eq=False)
class Send:
    """One send: the state machine and what it takes to serve it. `reconnected`: it has been moved to a new stream."""

    key: RequestKey
    session: SendSession
    limits: FrameLimits
    codec: Codec
    block_ids: tuple[int, ...]
    on_done: Callable[[SendOutcome], None]
    peer: Peer
    opened_at: float
    reconnected: bool = False


@dataclass(slots=True)
class SenderCounters:
    """What a sender has done since it started.

    Attributes:
        unacked_bytes: frame bytes sent and not answered yet, over all streams. peak_unacked_bytes: their maximum.
        frames: frames sent. wire_bytes: their bytes. retries: frames sent again.
        links: streams opened.
    """

    unacked_bytes: int = 0
    peak_unacked_bytes: int = 0
    frames: int = 0
    wire_bytes: int = 0
    retries: int = 0
    links: int = 0
