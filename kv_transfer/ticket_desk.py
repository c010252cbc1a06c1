"""What the receiver's threads share: the tickets, the streams, the counters; and the carrying out of effects.

`KvReceiver` (the owner's calls, streams, housekeeping) and `FrameIntake` (the receive threads) meet here, under one
lock, which is never held while KV is touched, a reply is sent or the host is called.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field

from kv_transfer.frames import FrameLimits
from kv_transfer.inbound import FrameJob, InboundStream, ReceiverCounters
from kv_transfer.manifest import TicketRef
from kv_transfer.messages import Committed, FrameAck, FrameNack, Revocation, TicketRefused
from kv_transfer.negotiation import GRPC
from kv_transfer.receiving import (
    AckFrame,
    CommitTicket,
    ConfirmCommit,
    RefuseTicket,
    RejectFrame,
    ReleaseTicket,
    TicketEffect,
)
from kv_transfer.tickets import TicketTable
from pdcore.clock import Clock
from pdcore.types import RequestKey


@dataclass(slots=True)
class Target:
    """Where the frames of a live ticket go.

    `lane_bytes`: frame bytes taken, by the transport that they came by. `converted`: some came in another type than
    the cache's.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    limits: FrameLimits
    lane_bytes: dict[str, int] = field(default_factory=dict)
    converted: bool = False

    @property
    def main_transport(self) -> str:
        """The transport of most bytes."""
        return max(self.lane_bytes, key=self.lane_bytes.__getitem__, default=GRPC)

    def count(self, job: FrameJob) -> None:
        """A frame is taken."""
        self.lane_bytes[job.transport] = self.lane_bytes.get(job.transport, 0) + job.total


@dataclass(eq=False)
class TicketDesk:
    """Shared state of a receiver.

    Attributes:
        clock: the receiver's.
        lock: guards everything below but `jobs`.
        table: the state machine of all tickets. targets: where each live ticket's frames go.
        streams: those that are open, by number. counters: what was seen.
        jobs: frames and commits for the receive threads; None stops one of them. Credit bounds the bytes that wait
            there: a sender without credit sends nothing.
        releases: tickets whose end the host must hear of. housekeeping: notified when there is one.
    """

    clock: Clock
    lock: threading.Lock = field(default_factory=threading.Lock)
    table: TicketTable = field(default_factory=TicketTable)
    targets: dict[TicketRef, Target] = field(default_factory=dict)
    streams: dict[int, InboundStream] = field(default_factory=dict)
    counters: ReceiverCounters = field(default_factory=ReceiverCounters)
    jobs: queue.SimpleQueue[FrameJob | CommitTicket | None] = field(default_factory=queue.SimpleQueue)
    releases: deque[ReleaseTicket] = field(default_factory=deque)
    housekeeping: threading.Condition = field(default_factory=threading.Condition)

    def perform(self, effects: tuple[TicketEffect, ...], job: FrameJob | None = None) -> None:
        """Carry out what the table said, commits aside: they are queued under the lock (`queue_commits`). Not to be
        called under the lock.

        `job`: the frame that `AckFrame` and `RejectFrame` speak of.
        """
        for effect in effects:
            match effect:
                case AckFrame():
                    assert job is not None
                    held_s = self.clock.now() - job.arrived_at
                    self._answer(job, FrameAck(job.ref, job.frame_index, job.total, held_s, job.work_s))
                case RejectFrame(retryable, reason):
                    assert job is not None
                    # The thread that took the ticket back may come to say so only after this: a rejected frame alone
                    # would be a failure to the sender.
                    if isinstance(reason, Revocation):
                        self._tell(job.stream.number, TicketRefused(job.ref, reason))
                    self._answer(job, FrameNack(job.ref, job.frame_index, job.total, retryable, reason))
                case ConfirmCommit(number, ref):
                    self._tell(number, Committed(ref))
                case RefuseTicket(number, ref, reason):
                    self._tell(number, TicketRefused(ref, reason))
                case ReleaseTicket():
                    with self.housekeeping:
                        self.releases.append(effect)
                        self.housekeeping.notify_all()

    def queue_commits(self, effects: tuple[TicketEffect, ...]) -> None:
        """Give `CommitTicket` effects to the receive threads; under the lock, as frames are."""
        for effect in effects:
            if isinstance(effect, CommitTicket):
                self.jobs.put(effect)

    def count_bytes(self, stream: InboundStream, total: int) -> None:
        """Frame bytes are here, or announced; under the lock."""
        stream.outstanding += total
        counters = self.counters
        counters.buffered_bytes += total
        counters.peak_buffered_bytes = max(counters.peak_buffered_bytes, counters.buffered_bytes)
        counters.peak_stream_bytes = max(counters.peak_stream_bytes, stream.outstanding)

    def free_bytes(self, stream: InboundStream, total: int) -> None:
        """The memory of counted bytes is free again; under the lock."""
        stream.outstanding -= total
        self.counters.buffered_bytes -= total

    def _answer(self, job: FrameJob, reply: FrameAck | FrameNack) -> None:
        """The frame's memory goes before its credit does, and its lane may end only behind its answer."""
        job.frame = None
        with self.lock:
            self.free_bytes(job.stream, job.total)
            # Damaged ones, that is: others come for a ticket that is over, as when a client has gone.
            self.counters.rejected += isinstance(reply, FrameNack) and reply.retryable
        job.stream.push.reply(reply)
        if job.lane is not None:
            job.lane.answered()

    def _tell(self, number: int, reply: Committed | TicketRefused) -> None:
        with self.lock:
            stream = self.streams.get(number)
        if stream is not None:
            stream.push.reply(reply)
