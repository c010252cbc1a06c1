"""The decode worker's end: grants tickets, takes frames in, and hands filled tickets to its host.

Threads::

    a stream's reader (one each)   pieces -> frames, manifests and aborts -> the ticket table
    a process group's (one each)   announced frames -> frames
    receive threads                frames -> decode, verify, scatter -> acknowledgement; commits
    housekeeper                    leases, streams that never say hello, `TicketHost.on_release`

They meet in `TicketDesk` under one lock, which is never held while KV is touched, a reply is sent or the host is
called. `FrameIntake` is what the receive threads do.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kv_transfer.assembly import AssembledFrame
from kv_transfer.codecs.registry import STANDARD, CodecRegistry
from kv_transfer.frame_intake import FrameIntake
from kv_transfer.frames import FrameLimits
from kv_transfer.handshake import check_hello, welcome
from kv_transfer.head_ranges import heads_of
from kv_transfer.inbound import FrameJob, InboundStream, ReceiverCounters, StreamLaneHost, StreamReader
from kv_transfer.inbound_lanes import InboundLane, InboundLanes, PairLimit
from kv_transfer.lanes import FrameSink, ReceiveLane
from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import Abort, Hello, LaneOpen, Revocation
from kv_transfer.negotiation import GRPC, Site, negotiate
from kv_transfer.receiving import CommitTicket, RejectFrame, ReleaseTicket
from kv_transfer.site import local_offer
from kv_transfer.threads import CrashGuard, check_cores
from kv_transfer.ticket_desk import Target, TicketDesk
from kv_transfer.transport import KvStore, PushStream, StreamListener, TicketHost
from kv_transfer.transports.catalog import ReceiveLanes
from kv_transfer.transports.grpc_push import GrpcPushServicer
from pdcore.clock import Clock
from pdcore.config import TransferConfig, convertible
from pdcore.costs import CodecCost
from pdcore.errors import HandshakeRefused, TicketError
from pdcore.faults import FaultPoints
from pdcore.tracebacks import wordless
from pdcore.types import DTYPE_BYTES, KvEndpoint, KvTicket, RequestKey
from protos import kv_pb2_grpc

logger = logging.getLogger(__name__)

_TICK_S = 0.1


class KvReceiver:
    """Receives KV into a paged cache. Thread-safe; every method returns at once, but `close`.

    Args:
        worker_id, incarnation: of this decode worker; a sender that wants another incarnation is refused.
        store: the cache. config: bounds and preferences.
        host: told of every ticket's one end; see `TicketHost`.
        clock: of leases. faults: fault points of this process.
        codecs: those that it can decode. costs: what is known of their speeds, by plain name; senders are told.
        device: where the cache lives, as torch names it. encrypted: KV may leave the machine encrypted only.
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
        costs: Mapping[str, CodecCost] | None = None,
        device: str = "cpu",
        encrypted: bool = False,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        check_cores("transfer.cpu_affinity", config.cpu_affinity)
        self._incarnation = incarnation
        self._store = store
        self._config = config
        self._host = host
        self._clock = clock
        self._codecs = codecs
        self._decode_rates = tuple((cost.name, cost.decode_bytes_s) for cost in (costs or {}).values())
        self._offer = local_offer(config.transport, config.interface, device, encrypted=encrypted)
        self._lanes = ReceiveLanes(
            self._offer, device, config.lane_timeout_s, config.cpu_affinity, config.credit_bytes
        )
        self._pairs = PairLimit(config.max_pairs)
        self._desk = TicketDesk(clock)
        self._next_stream = 0
        self._closing = False
        self._streams_closed = False
        self._stopped = threading.Event()
        intake = FrameIntake(
            desk=self._desk, store=store, config=config, host=host, clock=clock, faults=faults, codecs=codecs
        )
        run = CrashGuard(on_crash).run
        self._workers = [
            threading.Thread(target=run, args=(intake.run,), name=f"kv-receive-{number}", daemon=True)
            for number in range(config.receive_threads)
        ]
        self._housekeeper = threading.Thread(target=run, args=(self._keep_house,), name="kv-housekeeper", daemon=True)
        for thread in (*self._workers, self._housekeeper):
            thread.start()

    # --- the owner ------------------------------------------------------------------------------------------------

    def grant(
        self,
        key: RequestKey,
        router_id: str,
        num_tokens: int,
        block_ids: Sequence[int],
        address: str,
        *,
        prefix_tokens: int = 0,
        codec: str = "",
    ) -> KvTicket:
        """Open a ticket for the KV of tokens ``[prefix_tokens, num_tokens)`` in these blocks.

        Args:
            block_ids: the sequence's block table, owned by the ticket until its end.
            address: ``host:port`` under which this receiver's servicer is reached.
            prefix_tokens: tokens in whole blocks whose KV is in place; nothing is written there.
            codec: the request's: a plain name or ``auto``; empty for the configured one. A codec that changes numbers
                is accepted only if it is the one.

        Raises:
            TicketError: the request has an open ticket, the blocks are too few, or the receiver is closing.
        """
        geometry = self._store.geometry
        if not 0 <= prefix_tokens < num_tokens <= len(block_ids) * geometry.block_size:
            raise TicketError(
                f"tokens {prefix_tokens}..{num_tokens} do not fit in {len(block_ids)} blocks of "
                f"{geometry.block_size} tokens"
            )
        sources = [dtype for dtype in DTYPE_BYTES if convertible(dtype, geometry.dtype, self._config.kv_conversion)]
        accepted = self._codecs.accepted(codec or self._config.codec, sources)
        with self._desk.lock:
            if self._closing:
                raise TicketError("the receiver is closing")
            ref = self._desk.table.grant(
                key=key,
                router_id=router_id,
                num_layers=geometry.num_layers,
                heads=heads_of(geometry),
                token_start=prefix_tokens,
                token_end=num_tokens,
                lease_s=self._config.lease_s,
                now=self._clock.now(),
            )
            limits = FrameLimits.for_ticket(
                ref=ref,
                key=key,
                geometry=geometry,
                token_start=prefix_tokens,
                token_end=num_tokens,
                codecs=accepted,
            )
            self._desk.targets[ref] = Target(key, tuple(block_ids), limits)
        return KvTicket(
            num_tokens=num_tokens,
            prefix_tokens=prefix_tokens,
            lease_s=self._config.lease_s,
            codecs=accepted,
            endpoints=(KvEndpoint(address, GRPC, *heads_of(geometry), *ref, self._incarnation),),
        )

    def renew(self, router_id: str) -> None:
        """Start the leases of all of this router's tickets anew."""
        with self._desk.lock:
            self._desk.table.renew(router_id, self._clock.now())

    def release(self, key: RequestKey, reason: str) -> None:
        """Take a ticket back. Idempotent, in any state; a ticket being committed is the host's to refuse."""
        with self._desk.lock:
            effects = self._desk.table.release(key, Revocation(reason))
        self._desk.perform(effects)

    def release_router(self, router_id: str, reason: str) -> None:
        """Take back every ticket of a router."""
        with self._desk.lock:
            effects = self._desk.table.release_router(router_id, Revocation(reason))
        self._desk.perform(effects)

    def revoke(self, key: RequestKey, reason: str) -> None:
        """Take a ticket back for want of memory: `TicketHost.on_release` hears that it failed by a `Revocation`."""
        with self._desk.lock:
            effects = self._desk.table.release(key, Revocation(reason), failed=True)
        self._desk.perform(effects)

    @property
    def open_tickets(self) -> int:
        """Tickets neither committed nor released."""
        with self._desk.lock:
            return self._desk.table.open_tickets

    @property
    def counters(self) -> ReceiverCounters:
        """A copy of the counters."""
        with self._desk.lock:
            return replace(self._desk.counters)

    def servicer(self) -> kv_pb2_grpc.KvServicer:
        """For the worker's gRPC server. Each stream holds one thread of the server's pool."""
        return GrpcPushServicer(self.accept, self._config.cpu_affinity)

    def close_streams(self) -> None:
        """End every stream, and every one that comes from now on; returns at once. Idempotent.

        To be called before the worker's gRPC server stops, which would wait for them. An uncommitted ticket ends with
        the stream that it is bound to, as if that had broken; the others stay.
        """
        with self._desk.lock:
            self._streams_closed = True
            streams = list(self._desk.streams.values())
        for stream in streams:
            stream.push.end()

    def close(self, timeout_s: float = 5.0) -> None:
        """End every stream and ticket, and wait for the threads at most this long. Idempotent."""
        with self._desk.lock:
            if self._closing:
                return
            self._closing = True
            effects = self._desk.table.release_all("the decode worker is shutting down")
        self._desk.perform(effects)
        self.close_streams()
        for _ in self._workers:
            self._desk.jobs.put(None)
        deadline = self._clock.now() + timeout_s
        for thread in self._workers:
            thread.join(max(0.0, deadline - self._clock.now()))
        self._drain_jobs()
        for thread in self._workers:
            if thread.is_alive():
                self._desk.jobs.put(None)  # its mark went with the rest
        # Last, so that it calls on_release for tickets whose last scatter has just ended.
        self._stopped.set()
        with self._desk.housekeeping:
            self._desk.housekeeping.notify_all()
        self._housekeeper.join(max(0.0, deadline - self._clock.now()))
        self._lanes.close(max(0.0, deadline - self._clock.now()))

    def _drain_jobs(self) -> None:
        """What is left if a receive thread did not stop in time: every frame is let go, every ticket ends."""
        while True:
            try:
                job = self._desk.jobs.get_nowait()
            except queue.Empty:
                return
            if isinstance(job, CommitTicket):
                with self._desk.lock:
                    effects = self._desk.table.commit_done(job.ref, False)
                self._desk.perform(effects)
            elif job is not None:
                self._desk.perform((RejectFrame(False, "the receiver is closing"),), job)

    # --- streams --------------------------------------------------------------------------------------------------

    def accept(self, push: PushStream) -> StreamListener:
        """A sender has opened a stream; its transport tells the listener what comes."""
        with self._desk.lock:
            self._next_stream += 1
            stream = InboundStream(self._next_stream, push, self._clock.now())
            self._desk.streams[stream.number] = stream
            closed = self._streams_closed
        if closed:
            push.end()
        return StreamReader(self, stream)

    def hello_arrived(self, stream: InboundStream, hello: Hello) -> None:
        """Admit a sender, or end its stream naming what differs."""
        try:
            stream.heads = check_hello(hello, self._incarnation, self._store.geometry, self._config.kv_conversion)
        except HandshakeRefused as error:
            stream.refused = True
            stream.push.refuse(str(error))
            return
        stream.dtype = hello.geometry.dtype
        outcome = negotiate(hello.offer, self._offer)
        host = StreamLaneHost(self, stream, hello.offer.site)
        stream.lanes = InboundLanes(host, outcome.transports, self._pairs.admit)
        stream.welcomed = True
        geometry = self._store.geometry
        stream.push.reply(
            welcome(
                self._incarnation,
                geometry,
                self._codecs.fitting(stream.dtype),
                credit_bytes=self._config.credit_bytes,
                negotiation=outcome,
                decode_rates=self._decode_rates,
            )
        )

    def now(self) -> float:
        """Reading of the receiver's clock."""
        return self._clock.now()

    def room_for(self, stream: InboundStream, ref: TicketRef) -> int:
        """A frame of this ticket begins: bytes that it may have; 0 if it is not wanted."""
        with self._desk.lock:
            if not self._desk.table.frame_begins(ref, stream.source, self._clock.now()):
                return 0
            return stream.limits(self._desk.targets[ref].limits).max_frame_bytes

    def credit_left(self, stream: InboundStream) -> int:
        """Frame bytes that this sender may still have under way."""
        with self._desk.lock:
            return self._config.credit_bytes - stream.outstanding

    def bytes_arrived(self, stream: InboundStream, total: int) -> None:
        """A frame of so many bytes is here, or announced: they count until it is answered."""
        with self._desk.lock:
            self._desk.count_bytes(stream, total)

    def bytes_freed(self, stream: InboundStream, total: int) -> None:
        """A frame that was counted will not become a job; its memory is free."""
        with self._desk.lock:
            self._desk.free_bytes(stream, total)

    def frame_arrived(self, stream: InboundStream, frame: AssembledFrame, lane: InboundLane | None) -> None:
        """A whole frame is here, and counted: let a receive thread look at it."""
        with self._desk.lock:
            if self._closing:
                self._desk.free_bytes(stream, frame.total)
                return  # the stream ends, and with it its credit
            # Under the lock, so that what was counted lies before the marks by which `close` stops the threads.
            job = FrameJob(stream, frame.ref, frame.frame_index, frame.total, frame, lane, self._clock.now())
            self._desk.jobs.put(job)

    def make_lane(self, opening: LaneOpen, sender: Site, sink: FrameSink) -> ReceiveLane:
        """The receiver's end of a lane from a sender at `sender`."""
        return self._lanes.make(opening, sender, sink)

    def manifest_arrived(self, stream: InboundStream, manifest: Manifest) -> None:
        """The sender of a ticket says that it is complete."""
        with self._desk.lock:
            effects = self._desk.table.manifest_arrived(manifest, stream.source, self._clock.now())
            self._desk.queue_commits(effects)
        self._desk.perform(effects)

    def abort_arrived(self, stream: InboundStream, abort: Abort) -> None:
        """The sender of a ticket gives up."""
        with self._desk.lock:
            effects = self._desk.table.sender_aborted(abort.ref, stream.source, abort.reason)
        self._desk.perform(effects)

    def stream_closed(self, stream: InboundStream, reason: str) -> None:
        """A stream is gone: so are the tickets that it was filling."""
        with self._desk.lock:
            self._desk.streams.pop(stream.number, None)
            effects = self._desk.table.stream_closed(stream.number, reason)
        self._desk.perform(effects)

    # --- housekeeper ----------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        while True:
            with self._desk.housekeeping:
                if not self._desk.releases and not self._stopped.is_set():
                    self._desk.housekeeping.wait(_TICK_S)
                releases = list(self._desk.releases)
                self._desk.releases.clear()
            for release in releases:
                self._release(release)
            if self._stopped.is_set() and not releases:
                return
            now = self._clock.now()
            with self._desk.lock:
                effects = self._desk.table.tick(now)
                mute = [
                    stream
                    for stream in self._desk.streams.values()
                    if not stream.welcomed
                    and not stream.refused
                    and now - stream.opened_at >= self._config.send_timeout_s
                ]
            self._desk.perform(effects)
            for stream in mute:
                stream.refused = True
                stream.push.refuse(f"no hello within {self._config.send_timeout_s} s")

    def _release(self, release: ReleaseTicket) -> None:
        with self._desk.lock:
            del self._desk.targets[release.ref]
            self._desk.counters.releases += 1
            self._desk.counters.failed += release.failed and not isinstance(release.reason, Revocation)
        try:
            self._host.on_release(release.key, release.reason, release.failed)
        except Exception as error:
            logger.exception("the host failed to release %s", release.key, exc_info=wordless(error))
