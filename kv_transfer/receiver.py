"""The decode worker's end: grants tickets, takes frames in, and hands filled tickets to its host.

Threads::

    a stream's reader (one each)   pieces -> frames, manifests and aborts -> the ticket table
    receive threads                frames -> decode, verify, scatter -> acknowledgement; commits
    housekeeper                    leases, streams that never say hello, `TicketHost.on_release`

They meet in `TicketTable` under one lock, which is never held while KV is touched, a reply is sent or the host is
called.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.assembly import AssembledFrame
from kv_transfer.codecs.registry import STANDARD, CodecRegistry
from kv_transfer.frames import FrameLimits, decode_header
from kv_transfer.handshake import check_hello, welcome
from kv_transfer.inbound import FrameJob, InboundStream, ReceiverCounters, StreamReader
from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import (
    Abort,
    Committed,
    FrameAck,
    FrameNack,
    Hello,
    TicketRefused,
)
from kv_transfer.packing import unpack_frame
from kv_transfer.receiving import (
    AckFrame,
    CommitTicket,
    ConfirmCommit,
    DecodeFrame,
    RefuseTicket,
    RejectFrame,
    ReleaseTicket,
    ScatterFrame,
    TicketEffect,
)
from kv_transfer.threads import CrashGuard, check_cores, pin_thread
from kv_transfer.tickets import TicketTable
from kv_transfer.transport import KvStore, PushStream, StreamListener, TicketHost
from kv_transfer.transports.grpc_push import GrpcPushServicer
from pdcore.clock import Clock
from pdcore.config import TransferConfig
from pdcore.errors import FrameError, HandshakeRefused, TicketError
from pdcore.faults import FaultPoints
from pdcore.types import KvEndpoint, KvTicket, KvTransferStats, RequestKey
from protos import kv_pb2_grpc

logger = logging.getLogger(__name__)

_TICK_S = 0.1


@dataclass(slots=True)
class _Target:
    """Where the frames of a live ticket go."""

    key: RequestKey
    block_ids: tuple[int, ...]
    limits: FrameLimits


class KvReceiver:
    """Receives KV into a paged cache. Thread-safe; every method returns at once, but `close`.

    Args:
        worker_id, incarnation: of this decode worker; a sender that wants another incarnation is refused.
        store: the cache. config: bounds and preferences.
        host: told of every ticket's one end; see `TicketHost`.
        clock: of leases. faults: fault points of this process.
        codecs: those that it can decode.
        on_crash: told, once, that a receive thread or the housekeeper has died of an error: tickets may never end.
            Called from that thread; must not block. None: it is only logged.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        store: KvStore,
        config: TransferConfig,
        host: TicketHost,
        clock: Clock,
        faults: FaultPoints,
        codecs: CodecRegistry = STANDARD,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        check_cores("transfer.cpu_affinity", config.cpu_affinity)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._store = store
        self._config = config
        self._host = host
        self._clock = clock
        self._faults = faults
        self._registry = codecs
        self._codecs = codecs.accepted(config.codec, store.geometry.dtype)
        self._lock = threading.Lock()
        self._table = TicketTable()
        self._targets: dict[TicketRef, _Target] = {}
        self._streams: dict[int, InboundStream] = {}
        self._next_stream = 0
        self._counters = ReceiverCounters()
        self._closing = False
        self._streams_closed = False
        self._stopped = threading.Event()
        # Credit bounds the bytes that wait here: a sender without credit sends nothing.
        self._jobs: queue.SimpleQueue[FrameJob | CommitTicket | None] = queue.SimpleQueue()
        self._releases: deque[ReleaseTicket] = deque()
        self._housekeeping = threading.Condition()
        run = CrashGuard(on_crash).run
        self._workers = [
            threading.Thread(target=run, args=(self._work,), name=f"kv-receive-{number}", daemon=True)
            for number in range(config.receive_threads)
        ]
        self._housekeeper = threading.Thread(target=run, args=(self._keep_house,), name="kv-housekeeper", daemon=True)
        for thread in (*self._workers, self._housekeeper):
            thread.start()

    # --- the owner ------------------------------------------------------------------------------------------------

    def grant(
        self, key: RequestKey, router_id: str, num_tokens: int, block_ids: Sequence[int], address: str
    ) -> KvTicket:
        """Open a ticket for the KV of ``num_tokens`` tokens in these blocks.

        Args:
            block_ids: the sequence's block table, owned by the ticket until its end.
            address: ``host:port`` under which this receiver's servicer is reached.

        Raises:
            TicketError: the request has an open ticket, the blocks are too few, or the receiver is closing.
        """
        geometry = self._store.geometry
        if not 1 <= num_tokens <= len(block_ids) * geometry.block_size:
            raise TicketError(
                f"{num_tokens} tokens do not fit in {len(block_ids)} blocks of {geometry.block_size} tokens"
            )
        with self._lock:
            if self._closing:
                raise TicketError("the receiver is closing")
            ref = self._table.grant(
                key=key,
                router_id=router_id,
                num_layers=geometry.num_layers,
                token_start=0,
                token_end=num_tokens,
                lease_s=self._config.lease_s,
                now=self._clock.now(),
            )
            limits = FrameLimits.for_ticket(
                ref=ref, key=key, geometry=geometry, token_start=0, token_end=num_tokens, codecs=self._codecs
            )
            self._targets[ref] = _Target(key, tuple(block_ids), limits)
        return KvTicket(
            ticket_id=ref.ticket_id,
            generation=ref.generation,
            worker_incarnation=self._incarnation,
            num_tokens=num_tokens,
            prefix_tokens=0,
            lease_s=self._config.lease_s,
            codecs=self._codecs,
            endpoints=(KvEndpoint(address, self._config.transport, 0, geometry.num_kv_heads),),
        )

    def renew(self, router_id: str) -> None:
        """Start the leases of all of this router's tickets anew."""
        with self._lock:
            self._table.renew(router_id, self._clock.now())

    def release(self, key: RequestKey, reason: str) -> None:
        """Take a ticket back. Idempotent, in any state; a ticket being committed is the host's to refuse."""
        with self._lock:
            effects = self._table.release(key, reason)
        self._perform(effects)

    def release_router(self, router_id: str, reason: str) -> None:
        """Take back every ticket of a router."""
        with self._lock:
            effects = self._table.release_router(router_id, reason)
        self._perform(effects)

    def revoke(self, key: RequestKey, reason: str) -> None:
        """Take a ticket back against its request's interest: `TicketHost.on_release` hears that it failed."""
        with self._lock:
            effects = self._table.release(key, reason, failed=True)
        self._perform(effects)

    @property
    def open_tickets(self) -> int:
        """Tickets neither committed nor released."""
        with self._lock:
            return self._table.open_tickets

    @property
    def counters(self) -> ReceiverCounters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def servicer(self) -> kv_pb2_grpc.KvServicer:
        """For the worker's gRPC server. Each stream holds one thread of the server's pool."""
        return GrpcPushServicer(self._accept, self._config.cpu_affinity)

    def close_streams(self) -> None:
        """End every stream, and every one that comes from now on; returns at once. Idempotent.

        To be called before the worker's gRPC server stops, which would wait for them. An uncommitted ticket ends with
        the stream that it is bound to, as if that had broken; the others stay.
        """
        with self._lock:
            self._streams_closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.push.end()

    def close(self, timeout_s: float = 5.0) -> None:
        """End every stream and ticket, and wait for the threads at most this long. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            effects = self._table.release_all("the decode worker is shutting down")
        self._perform(effects)
        self.close_streams()
        for _ in self._workers:
            self._jobs.put(None)
        deadline = self._clock.now() + timeout_s
        for thread in self._workers:
            thread.join(max(0.0, deadline - self._clock.now()))
        self._drain_jobs()
        for thread in self._workers:
            if thread.is_alive():
                self._jobs.put(None)  # its mark went with the rest
        # Last, so that it calls on_release for tickets whose last scatter has just ended.
        self._stopped.set()
        with self._housekeeping:
            self._housekeeping.notify_all()
        self._housekeeper.join(max(0.0, deadline - self._clock.now()))

    def _drain_jobs(self) -> None:
        """What is left if a receive thread did not stop in time: every frame is let go, every ticket ends."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if isinstance(job, CommitTicket):
                with self._lock:
                    effects = self._table.commit_done(job.ref, False)
                self._perform(effects)
            elif job is not None:
                self._perform((RejectFrame(False, "the receiver is closing"),), job)

    # --- streams --------------------------------------------------------------------------------------------------

    def _accept(self, push: PushStream) -> StreamListener:
        with self._lock:
            self._next_stream += 1
            stream = InboundStream(self._next_stream, push, self._clock.now())
            self._streams[stream.number] = stream
            closed = self._streams_closed
        if closed:
            push.end()
        return StreamReader(self, stream)

    def hello_arrived(self, stream: InboundStream, hello: Hello) -> None:
        """Admit a sender, or end its stream naming what differs."""
        try:
            check_hello(hello, self._incarnation, self._store.geometry)
        except HandshakeRefused as error:
            stream.refused = True
            stream.push.refuse(str(error))
            return
        stream.welcomed = True
        stream.push.reply(welcome(self._incarnation, self._store.geometry, self._codecs, self._config.credit_bytes))

    def now(self) -> float:
        """Reading of the receiver's clock."""
        return self._clock.now()

    def room_for(self, stream: InboundStream, ref: TicketRef) -> int:
        """A frame of this ticket begins: bytes that it may have; 0 if it is not wanted."""
        with self._lock:
            if not self._table.frame_begins(ref, stream.number, self._clock.now()):
                return 0
            return self._targets[ref].limits.max_frame_bytes

    def credit_left(self, stream: InboundStream) -> int:
        """Frame bytes that this sender may still have under way."""
        with self._lock:
            return self._config.credit_bytes - stream.outstanding

    def frame_arrived(self, stream: InboundStream, frame: AssembledFrame) -> None:
        """A whole frame is here: count it, and let a receive thread look at it."""
        with self._lock:
            if self._closing:
                return  # the stream ends, and with it its credit
            stream.outstanding += frame.total
            counters = self._counters
            counters.buffered_bytes += frame.total
            counters.peak_buffered_bytes = max(counters.peak_buffered_bytes, counters.buffered_bytes)
            counters.peak_stream_bytes = max(counters.peak_stream_bytes, stream.outstanding)
            # Under the lock, so that what was counted lies before the marks by which `close` stops the threads.
            self._jobs.put(FrameJob(stream, frame.ref, frame.frame_index, frame.total, frame))

    def manifest_arrived(self, stream: InboundStream, manifest: Manifest) -> None:
        """The sender of a ticket says that it is complete."""
        with self._lock:
            effects = self._table.manifest_arrived(manifest, stream.number, self._clock.now())
            self._queue_commits(effects)
        self._perform(effects)

    def abort_arrived(self, stream: InboundStream, abort: Abort) -> None:
        """The sender of a ticket gives up."""
        with self._lock:
            effects = self._table.sender_aborted(abort.ref, stream.number, abort.reason)
        self._perform(effects)

    def stream_closed(self, stream: InboundStream, reason: str) -> None:
        """A stream is gone: so are the tickets that it was filling."""
        with self._lock:
            self._streams.pop(stream.number, None)
            effects = self._table.stream_closed(stream.number, reason)
        self._perform(effects)

    # --- receive threads ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pin_thread(self._config.cpu_affinity)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, CommitTicket):
                self._commit(job)
            else:
                self._receive(job)

    def _receive(self, job: FrameJob) -> None:
        """One frame from its bytes to its answer."""
        self._faults.hit("decode.frame_received")
        frame = job.frame
        assert frame is not None
        with self._lock:
            effects = self._table.frame_offered(
                job.ref,
                job.frame_index,
                stream=job.stream.number,
                wire_bytes=job.total,
                first_byte_at=frame.first_byte_at,
                now=self._clock.now(),
            )
            target = self._targets.get(job.ref)
        if not isinstance(effects[0], DecodeFrame):
            self._perform(effects, job)
            return
        assert target is not None, "a frame is wanted for a ticket without blocks"
        if frame.data is None:
            problem = f"a frame of {job.total} bytes; this ticket takes {target.limits.max_frame_bytes} at most"
            self._frame_bad(job, FrameError(problem), retryable=False)
            return
        try:
            header = decode_header(frame.data, target.limits)
            values = unpack_frame(frame.data, header, self._registry)
        except FrameError as error:
            self._frame_bad(job, error, error.retryable)
            return
        except Exception as error:
            # A bug of ours must not cost the thread: the frame is answered, its ticket ends.
            logger.exception("decoding frame %d of %s failed", job.frame_index, target.key)
            self._frame_bad(job, FrameError(f"decoding failed: {error}"), retryable=False)
            return
        codec_bytes = tuple((section.codec, section.raw_bytes) for section in header.sections)
        with self._lock:
            effects = self._table.frame_verified(job.ref, job.frame_index, header.span, header.checksums, codec_bytes)
        if not isinstance(effects[0], ScatterFrame):
            self._perform(effects, job)
            return
        try:
            self._store.scatter(header.span.layer_start, target.block_ids, header.span.token_start, values)
        except Exception as error:
            # Whatever the cache objects to, the ticket must end and its scatter must count as over.
            logger.exception("scatter of frame %d of %s failed", job.frame_index, target.key)
            with self._lock:
                effects = self._table.scatter_failed(job.ref, job.frame_index, f"scatter failed: {error}")
            self._perform(effects, job)
            return
        self._faults.hit("decode.frame_scattered")
        del values, frame
        with self._lock:
            self._counters.frames += 1
            effects = self._table.frame_scattered(job.ref, job.frame_index)
            self._queue_commits(effects)
        self._perform(effects, job)

    def _frame_bad(self, job: FrameJob, error: FrameError, retryable: bool) -> None:
        with self._lock:
            effects = self._table.frame_bad(job.ref, job.frame_index, retryable, str(error))
        self._perform(effects, job)

    def _commit(self, ticket: CommitTicket) -> None:
        """Offer a filled ticket to the host."""
        self._faults.hit("decode.before_commit")
        counts = ticket.counts
        now = self._clock.now()
        with self._lock:
            target = self._targets[ticket.ref]
        stats = KvTransferStats(
            blocks=self._store.geometry.blocks_for(target.limits.token_end),
            raw_bytes=counts.raw_bytes,
            wire_bytes=counts.wire_bytes,
            codec=counts.main_codec,
            transport=self._config.transport,
            seconds=now - (counts.first_byte_at if counts.first_byte_at is not None else now),
            frames=counts.frames,
            retries=counts.retries,
        )
        try:
            accepted = self._host.on_commit(ticket.key, ticket.first_token, stats)
        except Exception:
            logger.exception("the host failed to commit %s", ticket.key)
            accepted = False
        if accepted:
            self._faults.hit("decode.after_commit")
        with self._lock:
            if accepted:
                del self._targets[ticket.ref]
                self._counters.commits += 1
            effects = self._table.commit_done(ticket.ref, accepted)
        self._perform(effects)

    # --- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effects: tuple[TicketEffect, ...], job: FrameJob | None = None) -> None:
        """Carry out what the table said, commits aside: they are queued under the lock (`_queue_commits`).

        `job`: the frame that `AckFrame` and `RejectFrame` speak of.
        """
        for effect in effects:
            match effect:
                case AckFrame():
                    assert job is not None
                    self._free(job, rejected=False)
                    job.stream.push.reply(FrameAck(job.ref, job.frame_index, job.total))
                case RejectFrame(retryable, reason):
                    assert job is not None
                    self._free(job, rejected=True)
                    job.stream.push.reply(FrameNack(job.ref, job.frame_index, job.total, retryable, reason))
                case ConfirmCommit(number, ref):
                    self._tell(number, Committed(ref))
                case RefuseTicket(number, ref, reason):
                    self._tell(number, TicketRefused(ref, reason))
                case ReleaseTicket():
                    with self._housekeeping:
                        self._releases.append(effect)
                        self._housekeeping.notify_all()

    def _queue_commits(self, effects: tuple[TicketEffect, ...]) -> None:
        """Give `CommitTicket` effects to the receive threads; under the lock, as frames are."""
        for effect in effects:
            if isinstance(effect, CommitTicket):
                self._jobs.put(effect)

    def _free(self, job: FrameJob, rejected: bool) -> None:
        """The frame's memory goes before its credit does."""
        job.frame = None
        with self._lock:
            job.stream.outstanding -= job.total
            self._counters.buffered_bytes -= job.total
            self._counters.rejected += rejected

    def _tell(self, number: int, reply: Committed | TicketRefused) -> None:
        with self._lock:
            stream = self._streams.get(number)
        if stream is not None:
            stream.push.reply(reply)

    # --- housekeeper ----------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        while True:
            with self._housekeeping:
                if not self._releases and not self._stopped.is_set():
                    self._housekeeping.wait(_TICK_S)
                releases = list(self._releases)
                self._releases.clear()
            for release in releases:
                self._release(release)
            if self._stopped.is_set() and not releases:
                return
            now = self._clock.now()
            with self._lock:
                effects = self._table.tick(now)
                mute = [
                    stream
                    for stream in self._streams.values()
                    if not stream.welcomed
                    and not stream.refused
                    and now - stream.opened_at >= self._config.send_timeout_s
                ]
            self._perform(effects)
            for stream in mute:
                stream.refused = True
                stream.push.refuse(f"no hello within {self._config.send_timeout_s} s")

    def _release(self, release: ReleaseTicket) -> None:
        with self._lock:
            del self._targets[release.ref]
            self._counters.releases += 1
        try:
            self._host.on_release(release.key, release.reason, release.failed)
        except Exception:
            logger.exception("the host failed to release %s", release.key)
