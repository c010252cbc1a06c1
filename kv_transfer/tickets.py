"""The receiver's side of all transfers as a pure state machine: tickets, their generations, leases and frames.

Nothing here waits, replies, reads a clock or touches KV. `KvReceiver` feeds `TicketTable` what happens and carries
out the effects that it returns; the exhaustive tests feed it everything that could happen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kv_transfer.head_ranges import HeadRange
from kv_transfer.manifest import FrameSpan, Manifest, TicketRef
from kv_transfer.receiving import (
    AckFrame,
    CommitTicket,
    ConfirmCommit,
    DecodeFrame,
    ReceiveSession,
    RefuseTicket,
    RejectFrame,
    ReleaseTicket,
    ScatterFrame,
    Source,
    TicketEffect,
    TicketPhase,
)
from pdcore.errors import TicketError
from pdcore.types import RequestKey

ENDS_KEPT = 1024
"""Ended tickets of which is remembered how they ended, for senders that have not heard it yet."""


class TicketTable:
    """All tickets of one receiver.

    A ticket is a slot number, reused, and a generation, never reused: ``TicketRef``. Everything that comes off the
    wire names one, and what names no live ticket touches nothing.

    Every method takes one event and returns what is to be done, in order. `DecodeFrame`, `ScatterFrame`, `AckFrame`
    and `RejectFrame` speak of the frame of the event; each offered frame gets exactly one of the last two.

    Args:
        ends_kept: tickets, the last ones that ended, that are answered truly. What names an older one is stale, which
            is a failure to its sender, whereas a ticket that was taken back is nobody's. A slot may be used again
            before the sender of its last ticket has heard of the end, and again after that.
    """

    def __init__(self, ends_kept: int = ENDS_KEPT) -> None:
        self._ends_kept = ends_kept
        self._generation = 0
        self._sessions: dict[TicketRef, ReceiveSession] = {}
        self._by_key: dict[RequestKey, TicketRef] = {}
        self._free: list[int] = []
        self._slots = 0
        # How tickets ended, the oldest end first, to answer what comes late: the manifests of a commit, or a reason.
        self._ends: dict[TicketRef, tuple[Manifest, ...] | str] = {}

    # --- the owner ------------------------------------------------------------------------------------------------

    def grant(
        self,
        *,
        key: RequestKey,
        router_id: str,
        num_layers: int,
        heads: HeadRange,
        token_start: int,
        token_end: int,
        lease_s: float,
        now: float,
    ) -> TicketRef:
        """Open a ticket for tokens ``[token_start, token_end)`` of these heads.

        Raises:
            TicketError: the request has an open ticket already.
        """
        if key in self._by_key:
            raise TicketError(f"request {key.request_id} attempt {key.attempt} has a ticket already")
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
        else:
            slot = self._slots
            self._slots += 1
        self._generation += 1
        ref = TicketRef(slot, self._generation)
        self._sessions[ref] = ReceiveSession(
            ref=ref,
            key=key,
            router_id=router_id,
            num_layers=num_layers,
            heads=heads,
            token_start=token_start,
            token_end=token_end,
            lease_s=lease_s,
            deadline=now + lease_s,
        )
        self._by_key[key] = ref
        return ref

    def renew(self, router_id: str, now: float) -> None:
        """The router lives: its tickets' leases start anew."""
        for session in self._sessions.values():
            if session.router_id == router_id and now < session.deadline:
                session.deadline = now + session.lease_s

    def release(self, key: RequestKey, reason: str, failed: bool = False) -> tuple[TicketEffect, ...]:
        """The owner takes the ticket back (`failed`: against the request's interest). Idempotent."""
        ref = self._by_key.get(key)
        return self._end(self._sessions[ref], reason, failed) if ref is not None else ()

    def release_router(self, router_id: str, reason: str) -> tuple[TicketEffect, ...]:
        """Everything that belongs to a router is taken back."""
        return self._end_all(lambda session: session.router_id == router_id, reason, failed=False)

    def release_all(self, reason: str) -> tuple[TicketEffect, ...]:
        """Every ticket is taken back."""
        return self._end_all(lambda session: True, reason, failed=False)

    def tick(self, now: float) -> tuple[TicketEffect, ...]:
        """Time has passed: expire what was not renewed."""
        return self._end_all(lambda session: now >= session.deadline, "the ticket's lease expired", failed=True)

    @property
    def open_tickets(self) -> int:
        """Tickets neither committed nor released."""
        return len(self._sessions)

    # --- the wire -------------------------------------------------------------------------------------------------

    def frame_begins(self, ref: TicketRef, source: Source, now: float) -> bool:
        """The first bytes of a frame are here. True if the frame is worth memory.

        Its ticket listens to the source's stream from then on, so that it ends with it. If False, `frame_offered`
        will refuse the frame and say why.
        """
        session = self._sessions.get(ref)
        if session is None or session.phase is not TicketPhase.OPEN or now >= session.deadline:
            return False
        if not session.bind(source):
            return False
        session.deadline = now + session.lease_s
        return True

    def frame_offered(
        self, ref: TicketRef, index: int, *, source: Source, wire_bytes: int, first_byte_at: float, now: float
    ) -> tuple[TicketEffect, ...]:
        """A whole frame is here, not decoded yet."""
        session, late = self._open(ref, source, now)
        if session is None:
            return late
        session.deadline = now + session.lease_s
        counts = session.counts
        if counts.first_byte_at is None:
            counts = replace(counts, first_byte_at=first_byte_at)
        session.counts = replace(counts, wire_bytes=counts.wire_bytes + wire_bytes)
        if index in session.parts[source.stream].checksums:
            session.counts = replace(session.counts, retries=session.counts.retries + 1)
            return (AckFrame(),)
        return (DecodeFrame(),)

    def frame_verified(
        self,
        ref: TicketRef,
        stream: int,
        index: int,
        *,
        span: FrameSpan,
        checksums: tuple[int, ...],
        codec_bytes: tuple[tuple[str, int], ...],
    ) -> tuple[TicketEffect, ...]:
        """A wanted frame is decoded, and its checksums and header fit the ticket. `codec_bytes`: by section."""
        session = self._sessions.get(ref)
        if session is None or session.phase is not TicketPhase.OPEN:
            return (RejectFrame(False, self._why(ref)),)
        part = session.parts[stream]
        if index in part.checksums:  # two copies were decoded side by side
            return (AckFrame(),)
        if not part.coverage.add(span):
            reason = f"frame {index} covers what another frame covers, or nothing of the ticket"
            return (RejectFrame(False, reason), *self._end(session, reason, failed=True))
        part.checksums[index] = checksums
        part.in_flight.add(index)
        totals = dict(session.counts.codec_bytes)
        for codec, size in codec_bytes:
            totals[codec] = totals.get(codec, 0) + size
        session.counts = replace(
            session.counts,
            raw_bytes=session.counts.raw_bytes + sum(size for _, size in codec_bytes),
            frames=session.counts.frames + 1,
            codec_bytes=tuple(totals.items()),
        )
        return (ScatterFrame(),)

    def frame_bad(self, ref: TicketRef, index: int, retryable: bool, reason: str) -> tuple[TicketEffect, ...]:
        """A wanted frame is damaged (`retryable`: the sender may try again) or does not fit its ticket."""
        session = self._sessions.get(ref)
        if session is None or session.phase is not TicketPhase.OPEN:
            return (RejectFrame(False, self._why(ref)),)
        if retryable:
            session.counts = replace(session.counts, retries=session.counts.retries + 1)
            return (RejectFrame(True, reason),)
        return (RejectFrame(False, reason), *self._end(session, f"frame {index}: {reason}", failed=True))

    def frame_scattered(self, ref: TicketRef, stream: int, index: int) -> tuple[TicketEffect, ...]:
        """A frame is in its blocks."""
        session = self._sessions[ref]
        session.parts[stream].in_flight.remove(index)
        if session.phase is TicketPhase.ENDING:
            return (RejectFrame(False, session.end_reason), *self._finish_ending(session))
        return (AckFrame(), *self._try_commit(session))

    def scatter_failed(self, ref: TicketRef, stream: int, index: int, reason: str) -> tuple[TicketEffect, ...]:
        """A frame could not be written to its blocks: the ticket cannot be filled."""
        session = self._sessions[ref]
        session.parts[stream].in_flight.remove(index)
        effects = (
            self._finish_ending(session)
            if session.phase is TicketPhase.ENDING
            else self._end(session, f"frame {index}: {reason}", failed=True)
        )
        return (RejectFrame(False, reason), *effects)

    def manifest_arrived(self, manifest: Manifest, source: Source, now: float) -> tuple[TicketEffect, ...]:
        """A sender's closing statement, perhaps before its last frame, perhaps again."""
        ref = manifest.ref
        if ref not in self._sessions and manifest in self._committed_by(ref):
            return (ConfirmCommit(source.stream, ref),)
        session, late = self._open(ref, source, now)
        if session is None:
            return tuple(effect for effect in late if not isinstance(effect, RejectFrame))
        session.deadline = now + session.lease_s
        part = session.parts[source.stream]
        if part.manifest is not None:
            if part.manifest == manifest:
                return ()
            return self._end(session, "two manifests that differ", failed=True)
        if manifest.key != session.key or manifest.num_tokens != session.token_end:
            return self._end(
                session,
                f"manifest for {manifest.key} with {manifest.num_tokens} tokens, the ticket is for {session.key} "
                f"with {session.token_end}",
                failed=True,
            )
        part.manifest = manifest
        return self._try_commit(session)

    def commit_done(self, ref: TicketRef, accepted: bool) -> tuple[TicketEffect, ...]:
        """The host has answered a `CommitTicket`."""
        session = self._sessions[ref]
        assert session.phase is TicketPhase.COMMITTING, session.phase
        if accepted:
            self._remove(session, session.manifests)
            return tuple(ConfirmCommit(stream, ref) for stream in session.parts)
        session.phase = TicketPhase.ENDING
        session.end_reason = "the request is gone"
        refusals = (RefuseTicket(stream, ref, session.end_reason) for stream in session.parts)
        return (*refusals, *self._finish_ending(session))

    def sender_aborted(self, ref: TicketRef, source: Source, reason: str) -> tuple[TicketEffect, ...]:
        """A sender gives up. Not a failure to report from here: the sender's worker tells the router why."""
        session = self._sessions.get(ref)
        if session is None or not session.bind(source):
            return ()
        return self._end(session, f"the sender gave up: {reason}", failed=False, knows=source.stream)

    def stream_closed(self, stream: int, reason: str) -> tuple[TicketEffect, ...]:
        """A stream is gone, and with it a sender of the tickets that listened to it."""
        return self._end_all(lambda session: stream in session.parts, reason, failed=True, knows=stream)

    # --- inner steps ----------------------------------------------------------------------------------------------

    def _open(
        self, ref: TicketRef, source: Source, now: float
    ) -> tuple[ReceiveSession, tuple[()]] | tuple[None, tuple[TicketEffect, ...]]:
        """The session that may take something from `source`, or the refusal."""
        session = self._sessions.get(ref)
        expired: tuple[TicketEffect, ...] = ()
        if session is not None and session.phase is TicketPhase.OPEN:
            if now < session.deadline:
                if session.bind(source):
                    return session, ()
                reason = f"heads {source.heads} of the ticket are being filled by another stream"
                return None, (RefuseTicket(source.stream, ref, reason), RejectFrame(False, reason))
            expired = self._end(session, "the ticket's lease expired", failed=True)
        reason = self._why(ref)
        if self._over(ref):
            # The sender knows, or will: the confirmation or the refusal is on its way or lies behind it.
            return None, (RejectFrame(False, reason), *expired)
        return None, (RefuseTicket(source.stream, ref, reason), RejectFrame(False, reason), *expired)

    def _over(self, ref: TicketRef) -> bool:
        """The ticket is committed, or about to be."""
        session = self._sessions.get(ref)
        if session is not None:
            return session.phase is TicketPhase.COMMITTING
        return bool(self._committed_by(ref))

    def _committed_by(self, ref: TicketRef) -> tuple[Manifest, ...]:
        """The manifests that a ticket was committed by; empty if it was not, or is forgotten."""
        end = self._ends.get(ref)
        return end if isinstance(end, tuple) else ()

    def _why(self, ref: TicketRef) -> str:
        """Why a ticket takes nothing."""
        session = self._sessions.get(ref)
        if session is not None:
            return session.end_reason or f"the ticket is {session.phase.value}"
        end = self._ends.get(ref)
        if end is not None:
            return end if isinstance(end, str) else "the ticket is committed"
        if ref.ticket_id >= self._slots or ref.generation > self._generation:
            return f"ticket {ref.ticket_id} generation {ref.generation} was never granted"
        return f"ticket {ref.ticket_id} generation {ref.generation} is stale"

    def _try_commit(self, session: ReceiveSession) -> tuple[TicketEffect, ...]:
        if session.phase is not TicketPhase.OPEN or not session.all_scattered:
            return ()
        problem = session.manifest_problem()
        if problem is not None:
            return self._end(session, f"the manifest does not fit: {problem}", failed=True)
        session.phase = TicketPhase.COMMITTING
        manifest = session.manifests[0]
        return (CommitTicket(session.ref, session.key, manifest.first_tokens, session.counts, manifest.codec_reason),)

    def _end(
        self, session: ReceiveSession, reason: str, failed: bool, knows: int | None = None
    ) -> tuple[TicketEffect, ...]:
        """End an open ticket and tell its senders, but for the one on stream `knows`."""
        if session.phase is not TicketPhase.OPEN:
            return ()
        session.phase = TicketPhase.ENDING
        session.end_reason = reason
        session.end_failed = failed
        refusals = (RefuseTicket(stream, session.ref, reason) for stream in session.parts if stream != knows)
        return (*refusals, *self._finish_ending(session))

    def _end_all(
        self, chosen: Callable[[ReceiveSession], bool], reason: str, failed: bool, knows: int | None = None
    ) -> tuple[TicketEffect, ...]:
        sessions = [session for session in self._sessions.values() if chosen(session)]
        return tuple(effect for session in sessions for effect in self._end(session, reason, failed, knows))

    def _finish_ending(self, session: ReceiveSession) -> tuple[TicketEffect, ...]:
        if session.in_flight:
            return ()
        self._remove(session, session.end_reason)
        return (ReleaseTicket(session.ref, session.key, session.end_reason, session.end_failed),)

    def _remove(self, session: ReceiveSession, end: tuple[Manifest, ...] | str) -> None:
        del self._sessions[session.ref]
        del self._by_key[session.key]
        self._free.append(session.ref.ticket_id)
        self._ends[session.ref] = end
        if len(self._ends) > self._ends_kept:
            del self._ends[next(iter(self._ends))]

    def check_integrity(self) -> None:
        """Asserts the table's own invariants."""
        assert {session.key: ref for ref, session in self._sessions.items()} == self._by_key
        used = [ref.ticket_id for ref in self._sessions]
        assert sorted(used + self._free) == list(range(self._slots)), (used, self._free)
        for session in self._sessions.values():
            heads = [part.heads for part in session.parts.values()]
            assert all(one.overlap(other) is None for i, one in enumerate(heads) for other in heads[:i]), heads
            assert all(part.in_flight <= part.checksums.keys() for part in session.parts.values())
            assert session.phase is not TicketPhase.ENDING or session.in_flight, "an ended ticket lingers"
            assert session.phase is not TicketPhase.COMMITTING or not session.in_flight

    def copy(self) -> TicketTable:
        """An independent table in the same state."""
        twin = TicketTable(self._ends_kept)
        twin._generation = self._generation
        twin._sessions = {ref: session.copy() for ref, session in self._sessions.items()}
        twin._by_key = dict(self._by_key)
        twin._free = list(self._free)
        twin._slots = self._slots
        twin._ends = dict(self._ends)
        return twin

    def snapshot(self) -> tuple[object, ...]:
        """Hashable value of all that can still make a difference; texts and counters do not."""
        ends = ((ref, end if isinstance(end, tuple) else None) for ref, end in self._ends.items())
        return (
            self._generation,
            tuple(session.snapshot() for _, session in sorted(self._sessions.items())),
            tuple(sorted(self._free)),
            tuple(ends),
        )
