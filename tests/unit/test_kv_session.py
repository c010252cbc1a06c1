"""The pure parts of KV transfer, by example and by property; `test_kv_exhaustive` has the interleavings."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.assembly import FrameAssembler
from kv_transfer.head_ranges import HeadRange
from kv_transfer.inbound import FrameJob, InboundStream
from kv_transfer.manifest import Coverage, FrameSpan, TicketRef
from kv_transfer.messages import FrameNack, Piece, Revocation, TicketRefused
from kv_transfer.planning import LEAST_TOKENS, Computing, FramePlanner
from kv_transfer.receiving import CommitTicket, ConfirmCommit, RefuseTicket, RejectFrame, ReleaseTicket, Source
from kv_transfer.session import (
    AbortSend,
    Acked,
    CommitConfirmed,
    Computed,
    Disconnected,
    FailureKind,
    Finish,
    FrameDropped,
    FrameSent,
    Nacked,
    Refused,
    SendAbort,
    SendDone,
    SendManifest,
    SendPlan,
    SendSession,
    Tick,
)
from kv_transfer.ticket_desk import TicketDesk
from kv_transfer.tickets import TicketTable
from pdcore.clock import ManualClock
from pdcore.errors import FrameError, TicketError
from pdcore.types import RequestKey

SOURCE = Source(1, HeadRange(0, 1))

KEY = RequestKey("r", 0)
REF = TicketRef(0, 1)


def session_of(*, layers: int = 2, tokens: int = 4, retries: int = 1, frame_tokens: int = 4) -> SendSession:
    return SendSession(
        SendPlan(
            key=KEY,
            ref=REF,
            num_layers=layers,
            token_start=0,
            token_end=tokens,
            frame_tokens=frame_tokens,
            frame_bytes=1,
            layer_token_bytes=1,
            max_frame_retries=retries,
            timeout_s=5.0,
        )
    )


def send_all(session: SendSession, now: float = 0.0) -> list[object]:
    effects: list[object] = []
    while (task := session.take_frame()) is not None:
        effects += session.on_event(FrameSent(task.frame_index, (task.frame_index,), 10), now)
    return effects


# --- planner -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_frames_tile_the_sequence_whatever_the_chunks(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 7), "layers")
    start = data.draw(st.integers(0, 5), "prefix")
    end = start + data.draw(st.integers(1, 60) | st.integers(100, 400), "tokens")
    planner = FramePlanner(
        num_layers=layers,
        token_start=start,
        token_end=end,
        frame_tokens=data.draw(st.integers(1, 20) | st.integers(60, 256), "frame tokens"),
        group_bytes=data.draw(st.integers(1, 100), "group bytes"),
        layer_token_bytes=data.draw(st.integers(1, 5), "layer token bytes"),
    )
    coverage = Coverage(layers, start, end)
    ready = [start] * layers

    def take(some: bool) -> None:
        while (span := planner.next_span()) is not None and not (some and data.draw(st.booleans(), "stop")):
            assert span.token_count <= planner.frame_tokens
            assert span.token_count <= max(LEAST_TOKENS, planner.group_bytes // planner.layer_token_bytes)
            for layer in range(span.layer_start, span.layer_start + span.layer_count):
                assert span.token_start + span.token_count <= ready[layer], "taken before it was ready"
            assert span.layer_count == 1 or (
                span.layer_count * span.token_count * planner.layer_token_bytes <= planner.group_bytes
            )
            assert coverage.add(span), "two frames overlap"
            planner.take(span)
            planner.group_bytes = data.draw(st.integers(1, 600), "group bytes")

    step, done = 0, start
    while done < end:
        step += 1
        upto = min(end, done + data.draw(st.integers(1, 30) | st.integers(50, 300), "chunk"))
        planner.computing(Computing(done, upto, step))
        for layer in range(data.draw(st.integers(0, layers), "layers seen")):
            ready[layer] = upto
            planner.layers_done(step, layer + 1)
            take(some=True)
        planner.layers_done(step + 1, layers)  # of a step that does not run: no news
        ready = [upto] * layers
        planner.computed_to(upto)
        take(some=True)
        done = upto
    take(some=False)
    assert planner.exhausted
    assert coverage.complete


def test_a_group_waits_until_it_is_full() -> None:
    planner = FramePlanner(4, 0, 8, frame_tokens=8, group_bytes=16, layer_token_bytes=1)
    planner.computing(Computing(0, 8, 1))
    planner.layers_done(1, 1)
    assert planner.next_span() is None
    planner.layers_done(1, 3)
    span = planner.next_span()
    assert span == FrameSpan(0, 2, 0, 8)
    planner.take(span)
    assert planner.next_span() is None, "layer 2 waits for layer 3"
    planner.computed_to(8)
    assert planner.next_span() == FrameSpan(2, 2, 0, 8)


def test_a_layer_with_too_many_bytes_is_split_by_tokens() -> None:
    planner = FramePlanner(2, 0, 256, frame_tokens=256, group_bytes=150 * 4, layer_token_bytes=4)
    planner.computed_to(256)
    spans = []
    while (span := planner.next_span()) is not None:
        planner.take(span)
        spans.append(span)
    # 150 tokens would fit: two times 64 do without a rest that no codec likes.
    assert spans == [FrameSpan(layer, 1, start, 128) for start in (0, 128) for layer in (0, 1)]


def test_a_chunk_behind_a_gap_is_not_ready() -> None:
    planner = FramePlanner(1, 0, 8, frame_tokens=8, group_bytes=1, layer_token_bytes=1)
    planner.computing(Computing(4, 8, 1))
    planner.layers_done(1, 1)
    assert planner.watched_step is None
    assert planner.next_span() is None
    planner.computed_to(4)
    assert planner.watched_step == 1


# --- sender --------------------------------------------------------------------------------------------------------


def test_the_manifest_follows_the_last_frame_without_waiting() -> None:
    session = session_of()
    assert session.on_event(Finish((7,)), 0.0) == ()
    effects = send_all(session)
    assert len(effects) == 1
    manifest = effects[0]
    assert isinstance(manifest, SendManifest)
    assert manifest.manifest.num_frames == 2
    assert manifest.manifest.digest == zlib.crc32(bytes([0, 0, 0, 0, 1, 0, 0, 0]))
    assert session.on_event(CommitConfirmed(), 0.0) == (SendDone(None),)
    assert session.on_event(Refused("late"), 0.0) == ()


def test_a_nacked_frame_goes_again_even_behind_the_manifest() -> None:
    session = session_of(retries=1)
    session.on_event(Finish((7,)), 0.0)
    send_all(session)
    session.on_event(Nacked(1, True, "crc"), 0.0)
    task = session.take_frame()
    assert task is not None
    assert (task.frame_index, task.attempt) == (1, 1)
    assert session.on_event(FrameSent(1, (1,), 10), 0.0) == (), "no second manifest"
    effects = session.on_event(Nacked(1, True, "crc"), 0.0)
    assert [type(effect) for effect in effects] == [SendAbort, SendDone]
    assert session.failure is not None
    assert session.failure.kind is FailureKind.FRAME


def test_a_frame_that_reads_differently_the_second_time_fails() -> None:
    session = session_of()
    session.on_event(Finish((7,)), 0.0)
    send_all(session)
    session.on_event(Nacked(0, True, "crc"), 0.0)
    session.take_frame()
    effects = session.on_event(FrameSent(0, (99,), 10), 0.0)
    assert isinstance(effects[-1], SendDone)
    assert effects[-1].failure is not None


@pytest.mark.parametrize("event", [AbortSend("x"), Refused("x"), Disconnected("x"), Nacked(0, False, "x")])
def test_done_waits_for_the_gather_in_flight(event: object) -> None:
    session = session_of()
    session.on_event(Finish((7,)), 0.0)
    first = session.take_frame()
    assert first is not None
    session.on_event(FrameSent(0, (0,), 10), 0.0)
    second = session.take_frame()
    assert second is not None
    effects = session.on_event(event, 0.0)  # type: ignore[arg-type]
    told = [SendAbort] if isinstance(event, AbortSend | Nacked) else []
    assert [type(effect) for effect in effects] == told
    assert session.take_frame() is None
    (done,) = session.on_event(FrameDropped(second.frame_index, ""), 0.0)
    assert isinstance(done, SendDone)
    assert done.failure is not None


def test_the_clock_runs_only_while_the_receiver_is_waited_for() -> None:
    session = session_of()
    assert session.deadline() is None
    assert session.on_event(Tick(), 1000.0) == ()
    session.on_event(Computed(2), 1000.0)
    assert session.deadline() == 1005.0
    send_all(session, now=1001.0)
    assert session.deadline() == 1006.0
    session.on_event(Acked(0), 1002.0)
    session.on_event(Acked(1), 1003.0)
    assert session.deadline() is None, "the prefill computes"
    session.on_event(Finish((7,)), 2000.0)
    send_all(session, now=2000.0)
    session.on_event(Acked(2), 2001.0)
    session.on_event(Acked(3), 2001.0)
    assert session.deadline() == 2006.0, "the commit is waited for"
    assert session.on_event(Tick(), 2005.9) == ()
    effects = session.on_event(Tick(), 2006.0)
    assert isinstance(effects[-1], SendDone)
    assert effects[-1].failure is not None
    assert effects[-1].failure.kind is FailureKind.TIMEOUT


# --- coverage and the table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "span",
    [
        FrameSpan(0, 1, 3, 2),
        FrameSpan(0, 3, 4, 1),
        FrameSpan(2, 1, 4, 1),
        FrameSpan(0, 1, 8, 3),
        FrameSpan(0, 1, 10, 1),
        FrameSpan(0, 0, 4, 1),
        FrameSpan(0, 1, 4, 0),
        FrameSpan(-1, 1, 4, 1),
        FrameSpan(0, 2, 5, 1),
    ],
)
def test_coverage_refuses_what_is_outside_or_covered(span: FrameSpan) -> None:
    coverage = Coverage(2, 4, 10)
    assert coverage.add(FrameSpan(1, 1, 5, 2))
    before = coverage.snapshot()
    assert not coverage.add(span)
    assert coverage.snapshot() == before


@pytest.mark.parametrize("ends_kept", [1, 2])
def test_the_table_answers_what_comes_late(ends_kept: int) -> None:
    table = TicketTable(ends_kept)

    def grant(name: str) -> TicketRef:
        return table.grant(
            key=RequestKey(name, 0),
            router_id="router",
            num_layers=1,
            heads=SOURCE.heads,
            token_start=0,
            token_end=1,
            lease_s=10.0,
            now=0.0,
        )

    first = grant("r")
    with pytest.raises(TicketError):
        grant("r")
    session = session_of(layers=1, tokens=1)
    session.on_event(Finish((7,)), 0.0)
    (manifest,) = (effect.manifest for effect in send_all(session) if isinstance(effect, SendManifest))
    assert manifest.ref == first
    assert table.manifest_arrived(manifest, SOURCE, 0.0) == (), "it waits for its frame"
    assert table.frame_begins(first, SOURCE, 0.0)
    table.frame_offered(first, 0, source=SOURCE, wire_bytes=10, first_byte_at=0.0, now=0.0)
    assert not table.frame_begins(first, SOURCE._replace(stream=2), 0.0), "another stream"
    table.frame_verified(first, 1, 0, span=FrameSpan(0, 1, 0, 1), checksums=(0,), codec_bytes=(("raw", 1),))
    effects = table.frame_scattered(first, 1, 0)
    assert isinstance(effects[-1], CommitTicket)
    assert table.release(KEY, "while it commits") == ()
    assert table.commit_done(first, True) == (ConfirmCommit(1, first),)
    assert table.manifest_arrived(manifest, SOURCE, 0.0) == (ConfirmCommit(1, first),)
    assert table.release(KEY, "too late") == ()
    second = grant("b")
    assert (second.ticket_id, second.generation) == (first.ticket_id, first.generation + 1)
    assert isinstance(table.manifest_arrived(manifest, SOURCE, 0.0)[0], ConfirmCommit)
    assert table.tick(9.9) == ()
    assert [type(effect) for effect in table.tick(10.0)] == [ReleaseTicket]
    (answer,) = table.manifest_arrived(manifest, SOURCE, 0.0)
    if ends_kept == 1:
        assert isinstance(answer, RefuseTicket)
        assert "stale" in answer.reason
    else:
        assert answer == ConfirmCommit(1, first)
    table.check_integrity()


@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_who_comes_late_for_a_ticket_that_was_taken_back_hears_that_it_was(times: int) -> None:
    """Its slot may have been used by others since, and they may have ended too: it is nobody's failure still."""
    table = TicketTable()

    def grant(name: str) -> TicketRef:
        ref = table.grant(
            key=RequestKey(name, 0),
            router_id="router",
            num_layers=1,
            heads=SOURCE.heads,
            token_start=0,
            token_end=1,
            lease_s=10.0,
            now=0.0,
        )
        assert ref.ticket_id == 0, "the same slot"
        return ref

    first = grant("r")
    table.release(RequestKey("r", 0), Revocation("no room"), failed=True)
    for number in range(times):
        grant(str(number))
        table.release(RequestKey(str(number), 0), "some other end")
    grant("last")
    assert not table.frame_begins(first, SOURCE, 0.0)
    refuse, reject = table.frame_offered(first, 0, source=SOURCE, wire_bytes=1, first_byte_at=0.0, now=0.0)
    assert refuse == RefuseTicket(SOURCE.stream, first, "no room")
    assert isinstance(refuse, RefuseTicket)
    assert isinstance(refuse.reason, Revocation)
    assert reject == RejectFrame(False, "no room")
    assert table.open_tickets == 1, "who has the slot now is not touched"
    table.check_integrity()


@pytest.mark.parametrize("reason", ["gone", Revocation("gone")])
def test_a_rejected_frame_of_a_ticket_that_was_taken_back_does_not_come_as_a_failure(reason: str) -> None:
    """The thread that took it back, and is to tell the sender, may be behind the one that answers the frame."""

    class Push:
        def __init__(self) -> None:
            self.replies: list[object] = []

        def reply(self, reply: object) -> None:
            self.replies.append(reply)

    push, desk = Push(), TicketDesk(ManualClock())
    stream = desk.streams[1] = InboundStream(1, push, 0.0)  # type: ignore[arg-type]
    desk.count_bytes(stream, 10)
    desk.perform((RejectFrame(False, reason),), FrameJob(stream, REF, 0, 10, None, None, 0.0))
    nack = FrameNack(REF, 0, 10, False, "gone")
    told = [TicketRefused(REF, "gone"), nack] if isinstance(reason, Revocation) else [nack]
    assert push.replies == told
    assert all(isinstance(reply.reason, type(reason)) for reply in push.replies)  # type: ignore[attr-defined]


def test_no_new_scatter_starts_once_a_ticket_is_ending() -> None:
    table = TicketTable()
    ref = table.grant(
        key=KEY,
        router_id="router",
        num_layers=2,
        heads=SOURCE.heads,
        token_start=0,
        token_end=1,
        lease_s=10.0,
        now=0.0,
    )
    for index in (0, 1):
        table.frame_offered(ref, index, source=SOURCE, wire_bytes=10, first_byte_at=0.0, now=0.0)
    table.frame_verified(ref, 1, 0, span=FrameSpan(0, 1, 0, 1), checksums=(0,), codec_bytes=(("raw", 1),))
    assert [type(effect) for effect in table.release(KEY, "gone")] == [RefuseTicket]
    late = table.frame_verified(ref, 1, 1, span=FrameSpan(1, 1, 0, 1), checksums=(1,), codec_bytes=(("raw", 1),))
    assert late == (RejectFrame(False, "gone"),)
    assert [type(effect) for effect in table.frame_scattered(ref, 1, 0)] == [RejectFrame, ReleaseTicket]
    assert table.open_tickets == 0


# --- assembly ------------------------------------------------------------------------------------------------------


def pieces(data: bytes, cuts: Iterable[int]) -> list[Piece]:
    bounds = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [Piece(REF, 4, 0, start, len(data), data[start:end]) for start, end in pairwise(bounds)]


@given(st.binary(min_size=256, max_size=900), st.lists(st.integers(0, 900), max_size=5), st.booleans())
def test_pieces_make_the_frame(data: bytes, cuts: list[int], wanted: bool) -> None:
    assembler = FrameAssembler(lambda ref: 900 if wanted else 0, lambda: 900)
    *rest, last = pieces(data, cuts)
    assert all(assembler.add(piece, 1.0) is None for piece in rest)
    frame = assembler.add(last, 2.0)
    assert frame is not None
    assert frame.total == len(data)
    assert frame.first_byte_at == (1.0 if rest else 2.0)
    assert frame.data is None or bytes(frame.data) == data
    assert (frame.data is not None) == wanted


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(0, 700), st.binary(max_size=300))))
def test_pieces_of_any_kind_never_exceed_the_credit(stream: list[tuple[int, int, int, bytes]]) -> None:
    assembler = FrameAssembler(lambda ref: 600, lambda: 500)
    try:
        for index, offset, total, data in stream:
            frame = assembler.add(Piece(REF, index, 0, offset, total, data), 0.0)
            assert frame is None or frame.total <= 500
    except FrameError:
        pass
