"""What a sender makes of its measurements: which codecs it may use, what it chooses, and when it looks again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.choosing import _MOST_ADDRESSES, ASSUMED_LINK_BYTES_S, Chosen, CodecChooser, Forecast
from kv_transfer.codec_speed import assumed_costs
from kv_transfer.codecs.bexp3 import Bexp3Codec
from kv_transfer.codecs.bexp_zstd import BexpZstdCodec
from kv_transfer.codecs.q8 import Q8Codec
from kv_transfer.codecs.raw import RawCodec
from kv_transfer.codecs.registry import CodecRegistry
from kv_transfer.codecs.zstd import ZstdCodec
from kv_transfer.handshake import welcome
from kv_transfer.manifest import MAX_REASON_CHARS, Manifest, TicketRef
from kv_transfer.messages import FrameAck
from kv_transfer.negotiation import Negotiation
from kv_transfer.planning import Computing, FramePlanner
from kv_transfer.transports.wire import message_from_proto, message_to_proto, reply_from_proto, reply_to_proto
from pdcore.costs import CodecCost
from pdcore.errors import TransferError
from pdcore.types import KvGeometry, RequestKey

CODECS = CodecRegistry((Bexp3Codec(), BexpZstdCodec(), ZstdCodec(), RawCodec(), Q8Codec()))
COSTS = {
    "raw": CodecCost("raw", 1.0, 3e9, 3e9),
    "bexp3": CodecCost("bexp3", 1.4, 2e9, 2e9),
    "bexp-zstd": CodecCost("bexp-zstd", 1.5, 0.5e9, 1e9),
    "zstd": CodecCost("zstd", 1.3, 0.3e9, 0.8e9),
    "q8": CodecCost("q8", 2.0, 1e9, 1e9, lossless=False),
}
FRAME = 256 << 10
REF = TicketRef(0, 1)
ADDRESS = "10.0.0.1:7"


def choose(chooser: CodecChooser, asked: str = "auto", now: float = 0.0, transport: str = "grpc") -> Chosen:
    return chooser.choose(
        asked,
        CODECS.accepted(asked, ["bfloat16"]),
        ADDRESS,
        transport,
        raw_bytes=64 << 20,
        most_frame_bytes=FRAME,
        hidden_s=0.0,
        encoder_queue_bytes=0,
        now=now,
    )


def saturate(chooser: CodecChooser, bytes_s: float, start: float = 0.0, frames: int = 64) -> float:
    """A burst of frames that a link of that speed carries one by one; returns when the last has been answered."""
    link = chooser.link(ADDRESS, "grpc")
    for index in range(frames):
        link.posted(REF, index, "raw", raw_bytes=FRAME, wire_bytes=FRAME, now=start)
    for index in range(frames):
        link.answered(REF, index, 0.001, 0.0005, start + (index + 1) * FRAME / bytes_s + 0.001)
    return start + frames * FRAME / bytes_s + 0.001


# --- what is remembered ---------------------------------------------------------------------------------------------


def test_the_address_of_longest_ago_is_forgotten() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    kept = chooser.link("kept", "grpc")
    first = chooser.link("first", "grpc")
    for number in range(2 * _MOST_ADDRESSES):
        chooser.link(f"10.0.0.{number}", "grpc")
        assert chooser.link("kept", "grpc") is kept
    assert chooser.link("first", "grpc") is not first
    assert len(chooser._links) == len(chooser._decode) == _MOST_ADDRESSES


# --- how large frames are -------------------------------------------------------------------------------------------


def test_frames_are_as_large_as_the_measured_link_is_fast() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    assert choose(chooser).frame_bytes == FRAME, "the link is assumed to be fast"
    now = saturate(chooser, 12.5e6)
    assert choose(chooser, now=now).frame_bytes == pytest.approx(125_000, rel=0.1), "10 ms of 0.1 Gbit/s"


# --- what may be used ----------------------------------------------------------------------------------------------


def test_a_ticket_accepts_what_is_lossless_and_what_was_asked_for() -> None:
    assert CODECS.accepted("auto", ["bfloat16"]) == ("bexp3", "bexp-zstd", "zstd", "raw")
    assert CODECS.accepted("zstd", ["bfloat16"]) == ("zstd", "bexp3", "bexp-zstd", "raw")
    assert CODECS.accepted("q8", ["bfloat16"]) == ("q8", "bexp3", "bexp-zstd", "zstd", "raw")
    assert CODECS.accepted("bexp3", ["float32"]) == ("zstd", "raw")
    # KV of any type that the receiver converts.
    assert CODECS.accepted("auto", ["float32", "bfloat16"]) == ("bexp3", "bexp-zstd", "zstd", "raw")
    assert CODECS.fitting("float32") == ("zstd", "raw", "q8")
    assert CodecRegistry((RawCodec(), Q8Codec())).accepted("q9", ["float32"]) == ("raw",)


def test_what_both_ends_have_may_be_used() -> None:
    assert set(CODECS.usable(("morse", "raw", "q8"), "bfloat16")) == {"raw", "q8"}
    for accepted in (("morse",), ("q8",), ()):
        with pytest.raises(TransferError, match="no common lossless codec for bfloat16: ours are bexp3, ") as refused:
            CODECS.usable(accepted, "bfloat16")
        assert not refused.value.retryable


# --- the choice ----------------------------------------------------------------------------------------------------


def test_a_codec_that_was_asked_for_is_final() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    for asked in ("raw", "zstd", "q8"):
        chosen = choose(chooser, asked)
        assert (chosen.codec.name, chosen.reason, chosen.final) == (asked, "asked for", True)


def test_it_chooses_for_an_assumed_link_until_the_link_was_measured() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    chosen = choose(chooser)
    assert (chosen.codec.name, chosen.final) == ("bexp3", False)
    assert "10 Gbit/s assumed" in chosen.reason
    assert choose(chooser, transport="shm").codec.name == "raw"
    assert f"{ASSUMED_LINK_BYTES_S['shm'] / 125e6:g} Gbit/s assumed" in choose(chooser, transport="shm").reason
    end = saturate(chooser, 12.5e6)
    chosen = choose(chooser, now=end)
    assert (chosen.codec.name, chosen.final) == ("bexp-zstd", True)
    assert "assumed" not in chosen.reason
    assert not choose(chooser, now=end, transport="shm").final  # another way, of which nothing is known


def test_a_slow_encoder_and_a_slow_decoder_rule_a_codec_out() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    assert choose(chooser).codec.name == "bexp3"
    for _ in range(50):
        chooser.encoded("bexp3", FRAME, int(FRAME / 1.4), FRAME / 1e8, 1.0)
    assert choose(chooser, now=1.0).codec.name != "bexp3"
    # A minute later half of that is forgotten, an hour later all of it.
    assert choose(chooser, now=3600.0).codec.name == "bexp3"

    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    chooser.told(ADDRESS, [("bexp3", 1e8), ("morse", 1e8), ("raw", float("nan")), ("zstd", -1.0)])
    assert choose(chooser).codec.name != "bexp3"
    link = chooser.link(ADDRESS, "grpc")
    for index in range(50):
        link.posted(REF, index, "bexp3", raw_bytes=FRAME, wire_bytes=FRAME, now=float(index))
        link.answered(REF, index, 0.001, FRAME / 2e9, index + 0.5)
    assert choose(chooser, now=50.0).codec.name == "bexp3"


def test_a_ratio_that_is_not_reached_rules_a_codec_out() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    end = saturate(chooser, 12.5e6)
    assert choose(chooser, now=end).codec.name == "bexp-zstd"
    for _ in range(50):
        chooser.encoded("bexp-zstd", FRAME, FRAME, FRAME / 5e8, end)
    assert choose(chooser, now=end).codec.name == "bexp3"


def test_plain_zstd_is_for_caches_that_nothing_better_can_pack() -> None:
    costs = COSTS | {"zstd": CodecCost("zstd", 9.0, 1e10, 1e10)}
    assert choose(CodecChooser(CODECS, "bfloat16", costs)).codec.name != "zstd"
    assert choose(CodecChooser(CODECS, "bfloat16", costs), "zstd").codec.name == "zstd"
    chooser = CodecChooser(CODECS, "float32", costs)
    chosen = chooser.choose(
        "auto",
        CODECS.accepted("auto", ["float32"]),
        ADDRESS,
        "grpc",
        raw_bytes=64 << 20,
        most_frame_bytes=FRAME,
        hidden_s=0.0,
        encoder_queue_bytes=0,
        now=0.0,
    )
    assert chosen.codec.name == "zstd"


def test_raw_is_never_taken_for_slower_than_a_codec() -> None:
    """A wrong look at it would never be found out, since it would never be tried."""
    costs = COSTS | {"raw": CodecCost("raw", 1.0, 1e6, 1e6)}
    chooser = CodecChooser(CODECS, "bfloat16", costs)
    chosen = choose(chooser, transport="shm")
    assert chosen.codec.name == "raw"
    assert chosen.choice.exposed_s < 1.1 * (64 << 20) / 2e9


def test_how_transfers_came_out_corrects_the_model() -> None:
    """What it does not know of, such as cores that all stages share, is learned codec by codec, and forgotten."""
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    link = chooser.link(ADDRESS, "grpc")
    early = choose(chooser).forecast
    assert early.assumed
    end = saturate(chooser, 1e9, frames=200)
    chosen = choose(chooser, now=end)
    assert chosen.forecast == Forecast(link, "bexp3", chosen.choice.exposed_s, assumed=False)
    # It was said of an assumption, which has turned out wrong since.
    early.came_out(100.0, end)
    assert link.correction(early.codec, end) == 1.0
    forecast_s = chosen.choice.exposed_s
    for later in range(3):
        link.came_out("bexp3", forecast_s, 3 * forecast_s, end + later)
    assert link.correction("bexp3", end + 2) == pytest.approx(3.0, rel=0.1)
    assert link.correction("raw", end + 2) == link.correction("bexp3", end + 2)  # never tried
    link.came_out("raw", forecast_s, forecast_s, end + 2)
    assert link.correction("raw", end + 2) == pytest.approx(1.0)
    assert link.correction("bexp-zstd", end + 2) == pytest.approx(1.0)
    again = choose(chooser, now=end + 2)
    assert again.codec.name == "raw"
    assert {item.codec: item.exposed_s for item in again.choice.alternatives}["bexp3"] > 2 * forecast_s
    end = saturate(chooser, 1e9, start=3600.0, frames=200)
    assert choose(chooser, now=end).codec.name == "bexp3"
    # What is hidden anyway says nothing, and nothing makes the model wrong by more than a factor of four.
    link.came_out("raw", 0.00001, 0.0005, 5.0)
    assert link.correction("raw", 5.0) < 1.6
    for _ in range(10):
        link.came_out("zstd", 0.001, 100.0, 5.0)
    assert link.correction("zstd", 5.0) == 4.0


def test_a_link_that_nobody_waits_for_teaches_too() -> None:
    """It is never measured: what transfers wait for is work at both ends, of which raw is not always the least."""
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    link = chooser.link(ADDRESS, "shm")
    chosen = choose(chooser, transport="shm")
    assert chosen.codec.name == "raw"
    chosen.forecast.came_out(3 * chosen.forecast.seconds, 1.0)
    assert link.correction("raw", 1.0) == pytest.approx(3.0, rel=0.1)
    link.came_out("bexp3", chosen.forecast.seconds, chosen.forecast.seconds, 1.0)
    assert choose(chooser, transport="shm", now=1.0).codec.name == "bexp3"


def test_a_broken_stream_takes_its_frames_along_and_leaves_the_knowledge() -> None:
    chooser = CodecChooser(CODECS, "bfloat16", COSTS)
    end = saturate(chooser, 12.5e6)
    link = chooser.link(ADDRESS, "grpc")
    for index in range(3):
        link.posted(REF, index, "raw", raw_bytes=FRAME, wire_bytes=FRAME, now=end)
    link.lost(REF, 0)
    assert link.meter.in_flight_bytes == 2 * FRAME
    chooser.broken("10.0.0.2:7")
    assert link.meter.in_flight_bytes == 2 * FRAME
    chooser.broken(ADDRESS)
    assert link.meter.in_flight_bytes == 0
    assert choose(chooser, now=end).codec.name == "bexp-zstd"


def test_costs_cover_every_codec_that_fits() -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        chooser = CodecChooser(CODECS, dtype, assumed_costs(CODECS, dtype))
        for asked in ("auto", "raw", "q8"):
            chooser.choose(
                asked,
                CODECS.accepted(asked, [dtype]),
                ADDRESS,
                "grpc",
                raw_bytes=1,
                most_frame_bytes=FRAME,
                hidden_s=1.0,
                encoder_queue_bytes=5,
                now=0.0,
            )


# --- what the planner says of a send -------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_bytes_left_and_ready(data: st.DataObject) -> None:
    """Against counting (layer, token) pairs one by one."""
    layers, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    planner = FramePlanner(layers, 2, 2 + tokens, frame_tokens=5, group_bytes=20, layer_token_bytes=3)
    ready: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    computed, step = 2, 0
    while computed < 2 + tokens:
        end = data.draw(st.integers(computed + 1, 2 + tokens))
        step += 1
        planner.computing(Computing(computed, end, step))
        for done in range(layers + 1):
            planner.layers_done(step, done)
            ready |= {(layer, token) for layer in range(done) for token in range(computed, end)}
            while data.draw(st.booleans()) and (span := planner.next_span()) is not None:
                planner.take(span)
                taken |= {
                    (layer, token)
                    for layer in range(span.layer_start, span.layer_start + span.layer_count)
                    for token in range(span.token_start, span.token_start + span.token_count)
                }
            assert planner.left_bytes == 3 * (layers * tokens - len(taken))
            assert planner.ready_bytes == 3 * len(ready - taken)
        planner.computed_to(end)
        computed = end


# --- what travels -------------------------------------------------------------------------------------------------


def test_what_the_ends_tell_each_other_survives_the_wire() -> None:
    ack = FrameAck(REF, 3, 1000, held_s=0.25, work_s=0.000125)
    assert reply_from_proto(reply_to_proto(ack)) == ack
    absurd = reply_from_proto(reply_to_proto(FrameAck(REF, 3, 1000, held_s=1e9, work_s=-1.0)))
    assert isinstance(absurd, FrameAck)
    assert (absurd.held_s, absurd.work_s) == (pytest.approx(2**32 / 1e6), 0.0)
    geometry = KvGeometry("digest", 3, 2, 8, "bfloat16", 16, 64)
    greeting = welcome(
        "inc",
        geometry,
        ("raw", "zstd"),
        credit_bytes=1 << 20,
        negotiation=Negotiation(("grpc",), ()),
        decode_rates=(("raw", 2.5e9), ("zstd", 0.7e9)),
    )
    assert reply_from_proto(reply_to_proto(greeting)) == greeting
    manifest = Manifest(REF, RequestKey("r", 1), 10, 2, (5,), 77, "asked for")
    assert message_from_proto(message_to_proto(manifest)) == manifest
    long = message_from_proto(message_to_proto(replace(manifest, codec_reason="x" * 1000)))
    assert isinstance(long, Manifest)
    assert long.codec_reason == "x" * MAX_REASON_CHARS
