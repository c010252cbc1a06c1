"""The receive threads: a frame from its bytes to its answer, and commits."""

from __future__ import annotations

import logging

from kv_transfer.codecs.registry import CodecRegistry
from kv_transfer.conversion import convert
from kv_transfer.frames import decode_header
from kv_transfer.inbound import FrameJob
from kv_transfer.packing import unpack_frame
from kv_transfer.receiving import CommitTicket, DecodeFrame, ScatterFrame
from kv_transfer.staging import private_copy
from kv_transfer.threads import pin_thread
from kv_transfer.ticket_desk import TicketDesk
from kv_transfer.transport import KvStore, TicketHost
from pdcore.clock import Clock
from pdcore.config import TransferConfig
from pdcore.errors import FrameError
from pdcore.faults import FaultPoints
from pdcore.tracebacks import wordless
from pdcore.types import KvTransferStats

logger = logging.getLogger(__name__)


class FrameIntake:
    """Takes jobs off the desk: decode, verify, scatter, answer. `run` is the loop of one receive thread.

    Args:
        desk: where jobs come from and effects are carried out.
        store, config, host, clock, faults, codecs: the receiver's.
    """

    def __init__(
        self,
        *,
        desk: TicketDesk,
        store: KvStore,
        config: TransferConfig,
        host: TicketHost,
        clock: Clock,
        faults: FaultPoints,
        codecs: CodecRegistry,
    ) -> None:
        self._desk = desk
        self._store = store
        self._config = config
        self._host = host
        self._clock = clock
        self._faults = faults
        self._registry = codecs

    def run(self) -> None:
        pin_thread(self._config.cpu_affinity)
        while (job := self._desk.jobs.get()) is not None:
            if isinstance(job, CommitTicket):
                self._commit(job)
            else:
                self._receive(job)

    def _receive(self, job: FrameJob) -> None:
        """One frame from its bytes to its answer."""
        self._faults.hit("decode.frame_received")
        frame = job.frame
        assert frame is not None
        with self._desk.lock:
            effects = self._desk.table.frame_offered(
                job.ref,
                job.frame_index,
                source=job.stream.source,
                wire_bytes=job.total,
                first_byte_at=frame.first_byte_at,
                now=self._clock.now(),
            )
            target = self._desk.targets.get(job.ref)
        if not isinstance(effects[0], DecodeFrame):
            self._desk.perform(effects, job)
            return
        assert target is not None, "a frame is wanted for a ticket without blocks"
        limits = job.stream.limits(target.limits)
        if frame.data is None:
            problem = f"a frame of {job.total} bytes; this ticket takes {limits.max_frame_bytes} at most"
            self._frame_bad(job, FrameError(problem), retryable=False)
            return
        started = self._clock.now()
        try:
            # Checks of memory that another process can write to prove nothing about what is read next.
            data = private_copy(frame.data) if frame.shared else frame.data
            header = decode_header(data, limits)
            values = unpack_frame(data, header, self._registry)
            values = convert(values, header.dtype, self._store.geometry.dtype)
        except FrameError as error:
            self._frame_bad(job, error, error.retryable)
            return
        except Exception as error:
            # A bug of ours must not cost the thread: the frame is answered, its ticket ends.
            logger.exception("decoding frame %d of %s failed", job.frame_index, target.key, exc_info=wordless(error))
            self._frame_bad(job, FrameError(f"decoding failed: {type(error).__name__}"), retryable=False)
            return
        codec_bytes = tuple((section.codec, section.raw_bytes) for section in header.sections)
        with self._desk.lock:
            effects = self._desk.table.frame_verified(
                job.ref,
                job.stream.number,
                job.frame_index,
                span=header.span,
                checksums=header.checksums,
                codec_bytes=codec_bytes,
            )
        if not isinstance(effects[0], ScatterFrame):
            self._desk.perform(effects, job)
            return
        try:
            self._store.scatter(
                header.span.layer_start,
                target.block_ids,
                header.span.token_start,
                values,
                header.head_start - self._store.geometry.head_start,
            )
        except Exception as error:
            # Whatever the cache objects to, the ticket must end and its scatter must count as over.
            logger.exception(
                "scatter of frame %d of %s failed", job.frame_index, target.key, exc_info=wordless(error)
            )
            with self._desk.lock:
                effects = self._desk.table.scatter_failed(
                    job.ref, job.stream.number, job.frame_index, f"scatter failed: {type(error).__name__}"
                )
            self._desk.perform(effects, job)
            return
        job.work_s = self._clock.now() - started
        self._faults.hit("decode.frame_scattered")
        del values, frame, data
        with self._desk.lock:
            self._desk.counters.frames += 1
            target.count(job)
            target.converted |= header.dtype != self._store.geometry.dtype
            effects = self._desk.table.frame_scattered(job.ref, job.stream.number, job.frame_index)
            self._desk.queue_commits(effects)
        self._desk.perform(effects, job)

    def _frame_bad(self, job: FrameJob, error: FrameError, retryable: bool) -> None:
        with self._desk.lock:
            effects = self._desk.table.frame_bad(job.ref, job.frame_index, retryable, str(error))
        self._desk.perform(effects, job)

    def _commit(self, ticket: CommitTicket) -> None:
        """Offer a filled ticket to the host."""
        self._faults.hit("decode.before_commit")
        counts = ticket.counts
        now = self._clock.now()
        with self._desk.lock:
            target = self._desk.targets[ticket.ref]
        geometry, limits = self._store.geometry, target.limits
        stats = KvTransferStats(
            blocks=geometry.blocks_for(limits.token_end) - limits.token_start // geometry.block_size,
            raw_bytes=counts.raw_bytes,
            wire_bytes=counts.wire_bytes,
            codec=counts.main_codec,
            transport=target.main_transport,
            seconds=now - (counts.first_byte_at if counts.first_byte_at is not None else now),
            frames=counts.frames,
            retries=counts.retries,
            codec_reason=ticket.codec_reason,
            lossless=not target.converted and all(self._registry[name].lossless for name, _ in counts.codec_bytes),
        )
        try:
            accepted = self._host.on_commit(ticket.key, ticket.first_tokens, stats)
        except Exception as error:
            logger.exception("the host failed to commit %s", ticket.key, exc_info=wordless(error))
            accepted = False
        if accepted:
            self._faults.hit("decode.after_commit")
        with self._desk.lock:
            if accepted:
                del self._desk.targets[ticket.ref]
                self._desk.counters.commits += 1
            effects = self._desk.table.commit_done(ticket.ref, accepted)
        self._desk.perform(effects)
