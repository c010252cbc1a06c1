"""One ticket's transfer on the receiver's side, and what the receiver is told to do about it. Pure.

`ReceiveSession` holds the state of one granted ticket; `kv_transfer.tickets.TicketTable` moves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from kv_transfer.head_ranges import HeadRange, covered
from kv_transfer.manifest import Coverage, Manifest, TicketRef, frames_digest
from pdcore.types import RequestKey


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """What came in for one ticket.

    Attributes:
        raw_bytes: KV bytes scattered. wire_bytes: frame bytes received, headers and repeats included.
        frames: frames scattered. retries: frames that came more than once, or damaged.
        codec_bytes: decoded bytes by the codec that carried them.
        first_byte_at: clock reading at the first frame's first byte; None before it.
    """

    raw_bytes: int = 0
    wire_bytes: int = 0
    frames: int = 0
    retries: int = 0
    codec_bytes: tuple[tuple[str, int], ...] = ()
    first_byte_at: float | None = None

    @property
    def main_codec(self) -> str:
        """The codec of most bytes; ``raw`` if nothing came."""
        return max(self.codec_bytes, key=lambda item: item[1])[0] if self.codec_bytes else "raw"


class DecodeFrame(NamedTuple):
    """Effect: the frame is wanted; decode and verify it, then report `frame_verified` or `frame_bad`."""


class ScatterFrame(NamedTuple):
    """Effect: write the frame into the ticket's blocks, then report `frame_scattered` or `scatter_failed`."""


class AckFrame(NamedTuple):
    """Effect: acknowledge the frame on the stream it came by; its bytes are credit again."""


class RejectFrame(NamedTuple):
    """Effect: refuse the frame on the stream it came by; its bytes are credit again."""

    retryable: bool
    reason: str


class CommitTicket(NamedTuple):
    """Effect: every frame is in place and the manifest fits: offer the ticket to its host, report `commit_done`."""

    ref: TicketRef
    key: RequestKey
    first_tokens: tuple[int, ...]
    counts: TransferCounts
    codec_reason: str


class ConfirmCommit(NamedTuple):
    """Effect: tell the sender on `stream` that the ticket has become a sequence."""

    stream: int
    ref: TicketRef


class RefuseTicket(NamedTuple):
    """Effect: tell the sender on `stream` that the ticket is not, or no longer, to be filled."""

    stream: int
    ref: TicketRef
    reason: str


class ReleaseTicket(NamedTuple):
    """Effect, once for each ticket that is not committed: its blocks may be freed, nothing writes to them."""

    ref: TicketRef
    key: RequestKey
    reason: str
    failed: bool


TicketEffect: TypeAlias = (
    DecodeFrame | ScatterFrame | AckFrame | RejectFrame | CommitTicket | ConfirmCommit | RefuseTicket | ReleaseTicket
)


class Source(NamedTuple):
    """Where something of a ticket comes from: a stream, and the heads that its sender and this receiver share."""

    stream: int
    heads: HeadRange


class TicketPhase(StrEnum):
    """See `ReceiveSession`."""

    OPEN = "open"
    COMMITTING = "committing"
    ENDING = "ending"


@dataclass(slots=True)
class TicketPart:
    """What one sender brings of a ticket: all layers and tokens of some heads.

    Attributes:
        coverage: what its frames cover so far. checksums: of its frames, by index; those `in_flight` are being
            scattered.
        manifest: its closing statement; None before it.
    """

    heads: HeadRange
    coverage: Coverage
    checksums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    manifest: Manifest | None = None

    @property
    def all_scattered(self) -> bool:
        """The manifest is here, and as many frames as it names are in place."""
        return self.manifest is not None and not self.in_flight and len(self.checksums) >= self.manifest.num_frames

    def manifest_problem(self) -> str | None:
        """Why the manifest does not fit what was scattered; None if it fits. Call when nothing is in flight."""
        manifest = self.manifest
        assert manifest is not None
        assert not self.in_flight
        if sorted(self.checksums) != list(range(manifest.num_frames)):
            return f"{len(self.checksums)} frames came, not those of 0..{manifest.num_frames - 1}"
        if not self.coverage.complete:
            return "the frames do not cover every layer and token"
        digest = frames_digest(self.checksums[index] for index in range(manifest.num_frames))
        if digest != manifest.digest:
            return f"digest is {digest:08x}, the manifest says {manifest.digest:08x}"
        return None

    def copy(self) -> TicketPart:
        """An independent part in the same state."""
        return replace(
            self, coverage=self.coverage.copy(), checksums=dict(self.checksums), in_flight=set(self.in_flight)
        )

    def snapshot(self) -> tuple[object, ...]:
        """Hashable value of its state."""
        return (
            self.heads,
            self.coverage.snapshot(),
            tuple(sorted(self.checksums.items())),
            frozenset(self.in_flight),
            self.manifest,
        )


@dataclass(slots=True)
class ReceiveSession:
    """One granted ticket that is neither committed nor released.

    ::

                 manifest fits, all scattered             host takes it
         OPEN --------------------------------> COMMITTING -----------------> (committed: leaves the table)
          |              (CommitTicket)              |                          ConfirmCommit
          | release, revoke, expiry,                 | host refuses
          | sender's abort, stream gone,             v
          | misfit                             (released: leaves the table)
          v                                          ^  ReleaseTicket, once
        ENDING --------------------------------------'
                 no scatter in flight

    In OPEN, frames come in any order and any number of times: the first verified copy of an index is scattered, later
    ones are acknowledged and dropped. A manifest may come before its sender's last frame. In COMMITTING the outcome
    is the host's: a release that comes now is answered by the host refusing, which only the host can do atomically.

    `parts`: what each stream brings that the ticket listens to; those are the streams that a first frame or manifest
    came by, one for each range of heads. There is one, with all of `heads`, unless the prefill worker is
    tensor-parallel.
    """

    ref: TicketRef
    key: RequestKey
    router_id: str
    num_layers: int
    heads: HeadRange
    token_start: int
    token_end: int
    lease_s: float
    deadline: float
    phase: TicketPhase = TicketPhase.OPEN
    parts: dict[int, TicketPart] = field(default_factory=dict)
    end_reason: str = ""
    end_failed: bool = False
    counts: TransferCounts = field(default_factory=TransferCounts)

    def bind(self, source: Source) -> bool:
        """Listen to a source from now on. False if another one brings some of its heads already."""
        part = self.parts.get(source.stream)
        if part is not None:
            return part.heads == source.heads
        if any(other.heads.overlap(source.heads) for other in self.parts.values()):
            return False
        coverage = Coverage(self.num_layers, self.token_start, self.token_end)
        self.parts[source.stream] = TicketPart(source.heads, coverage)
        return True

    @property
    def in_flight(self) -> bool:
        """A scatter is under way."""
        return any(part.in_flight for part in self.parts.values())

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Those that have come."""
        return tuple(part.manifest for part in self.parts.values() if part.manifest is not None)

    @property
    def all_scattered(self) -> bool:
        """Every head has its sender, and of every sender the manifest is here and as many frames as it names."""
        return covered(self.heads, (part.heads for part in self.parts.values())) and all(
            part.all_scattered for part in self.parts.values()
        )

    def manifest_problem(self) -> str | None:
        """Why the manifests do not fit what was scattered; None if they fit. Call when nothing is in flight."""
        problems = (part.manifest_problem() for part in self.parts.values())
        if problem := next(filter(None, problems), None):
            return problem
        tokens = {manifest.first_tokens for manifest in self.manifests}
        return f"the senders sampled different first tokens: {sorted(tokens)}" if len(tokens) > 1 else None

    def copy(self) -> ReceiveSession:
        """An independent session in the same state."""
        return replace(
            self,
            parts={stream: part.copy() for stream, part in self.parts.items()},
        )

    def snapshot(self) -> tuple[object, ...]:
        """Hashable value of all that can still make a difference; texts and counters do not."""
        parts = ((stream, part.snapshot()) for stream, part in sorted(self.parts.items()))
        if self.phase is TicketPhase.ENDING:
            in_flight = (frozenset(part.in_flight) for part in self.parts.values())
            return self.ref, self.key, self.phase, tuple(in_flight)
        return self.ref, self.key, self.phase, self.deadline, tuple(parts)
