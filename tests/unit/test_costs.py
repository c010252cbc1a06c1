"""The cost model of a transfer against a simulation of its pipeline, frame by frame, and the choices against both."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.costs import (
    AUTO,
    RAW,
    RAW_MARGIN,
    TRANSFER_MARGIN,
    WORTH_S,
    CodecCost,
    TransferSnapshot,
    break_even_table,
    choose_codec,
    codec_break_even,
    exposed_seconds,
    frame_bytes_for,
    rebuild_break_even,
    transfer_or_recompute,
)

MIB = 1 << 20
RAW_COST = CodecCost("raw", 1.0, 4e9, 5e9)
FAST = CodecCost("bexp3", 1.38, 2.5e9, 3e9)
DENSE = CodecCost("bexp-zstd", 1.46, 0.6e9, 1.6e9)
LOSSY = CodecCost("q8", 1.94, 1e9, 1e9, lossless=False)


def simulated(transfer: TransferSnapshot, codec: CodecCost, frames: list[float]) -> float:
    """Exposed seconds of a transfer of these frames (raw bytes each), by playing them one after the other.

    Frame i is computed when its share of all bytes has been. What waits in the encoder's queue goes first, in frames
    as large as the first one.
    """
    jobs: list[tuple[float, float]] = []  # (ready at, raw bytes)
    left = float(transfer.encoder_queue_bytes)
    while left > 0:
        jobs.append((0.0, min(left, frames[0])))
        left -= frames[0]
    computed = 0.0
    for size in frames:
        computed += size
        jobs.append((transfer.hidden_s * computed / sum(frames), size))
    encoder = decoder = 0.0
    link = transfer.link_queue_bytes / transfer.link_bytes_s
    for ready, size in jobs:
        encoder = max(encoder, ready) + size / codec.encode_bytes_s
        link = max(link, encoder) + size / codec.ratio / transfer.link_bytes_s
        decoder = max(decoder, link) + size / codec.decode_bytes_s
    return decoder - transfer.hidden_s


@pytest.mark.parametrize(
    ("gbit", "most", "expected"),
    [
        (10.0, MIB, MIB),
        (0.25, MIB, 312_500),  # 10 ms
        (0.05, MIB, 65_536),  # 10 ms would be 62,500 bytes: the least
        (0.05, 4096, 4096),  # asked for
    ],
)
def test_frames_are_small_where_the_link_is_slow(gbit: float, most: int, expected: int) -> None:
    assert frame_bytes_for(gbit * 1e9 / 8, most) == expected


def one_frame_s(transfer: TransferSnapshot, codec: CodecCost) -> float:
    frame = min(transfer.frame_bytes, transfer.raw_bytes)
    stages = (codec.encode_bytes_s, codec.ratio * transfer.link_bytes_s, codec.decode_bytes_s)
    return sum(frame / rate for rate in stages)


unhurried = settings(deadline=None)

rates = st.floats(1e7, 2e10)
codec_costs = st.builds(CodecCost, st.sampled_from(["bexp3", "bexp-zstd", "zstd"]), st.floats(1.0, 4.0), rates, rates)
codec_sets = st.tuples(
    st.builds(CodecCost, st.just(RAW), st.just(1.0), rates, rates),
    *(st.builds(CodecCost, st.just(name), st.floats(1.0, 2.0), rates, rates) for name in ("bexp3", "bexp-zstd")),
)
snapshots = st.builds(
    TransferSnapshot,
    raw_bytes=st.integers(64 << 10, 32 * MIB),
    frame_bytes=st.integers(256 << 10, 4 * MIB),
    link_bytes_s=st.floats(1e6, 2e10),
    codecs=codec_sets,
    hidden_s=st.one_of(st.just(0.0), st.floats(1e-3, 3.0)),
    encoder_queue_bytes=st.one_of(st.just(0), st.integers(0, 16 * MIB)),
    link_queue_bytes=st.one_of(st.just(0), st.integers(0, 8 * MIB)),
    last=st.sampled_from(["", "raw", "bexp3", "bexp-zstd"]),
)


@unhurried
@given(snapshots, codec_costs, st.integers(0, 40))
def test_equal_frames_exactly(transfer: TransferSnapshot, codec: CodecCost, queued: int) -> None:
    count = math.ceil(transfer.raw_bytes / transfer.frame_bytes)
    frames = [transfer.raw_bytes / count] * count
    transfer = replace(transfer, encoder_queue_bytes=queued * frames[0])  # type: ignore[arg-type]  # whole frames
    assert exposed_seconds(transfer, codec) == pytest.approx(simulated(transfer, codec, frames), rel=1e-6, abs=1e-9)


@unhurried
@given(snapshots, codec_costs)
def test_a_short_last_frame_and_queue_within_two_frames(transfer: TransferSnapshot, codec: CodecCost) -> None:
    """What the closed form leaves out: that the last frame, and the last one queued, are smaller than the others."""
    full, rest = divmod(transfer.raw_bytes, transfer.frame_bytes)
    frames = [float(transfer.frame_bytes)] * full + ([float(rest)] if rest else [])
    error = exposed_seconds(transfer, codec) - simulated(transfer, codec, frames)
    assert abs(error) <= 2 * one_frame_s(transfer, codec) + 1e-9


@unhurried
@given(snapshots)
def test_the_choice_is_within_five_percent_of_the_best(transfer: TransferSnapshot) -> None:
    count = math.ceil(transfer.raw_bytes / transfer.frame_bytes)
    frame = transfer.raw_bytes / count
    # Whole frames in the queue, so that the simulation and the closed form speak of the same pipeline.
    queued = round(transfer.encoder_queue_bytes / frame) * frame
    transfer = replace(transfer, encoder_queue_bytes=queued)  # type: ignore[arg-type]
    seconds = {codec.name: simulated(transfer, codec, [frame] * count) for codec in transfer.codecs}
    best = min(seconds.values())
    choice = choose_codec(transfer)
    assert seconds[choice.codec] <= 1.05 * best + WORTH_S
    assert choice.exposed_s == pytest.approx(seconds[choice.codec], rel=1e-6, abs=1e-9)
    assert {item.codec for item in choice.alternatives} | {choice.codec} == set(seconds)
    if seconds[RAW] <= (1 + RAW_MARGIN) * best:
        assert choice.codec == RAW


@unhurried
@given(snapshots, st.sampled_from([AUTO, "q8", "tc4"]))
def test_a_lossy_codec_is_never_chosen_by_itself(transfer: TransferSnapshot, asked: str) -> None:
    fastest = CodecCost("q8", 50.0, 1e12, 1e12, lossless=False)
    choice = choose_codec(replace(transfer, codecs=(*transfer.codecs, fastest), asked=asked))
    assert (choice.codec == "q8") == (asked == "q8")
    if asked == "tc4":
        assert choice.reason.startswith("tc4 was asked for and cannot be used here; ")


def small(**changes: object) -> TransferSnapshot:
    transfer = TransferSnapshot(
        raw_bytes=64 * MIB, frame_bytes=256 << 10, link_bytes_s=125e6, codecs=(RAW_COST, FAST, DENSE)
    )
    return replace(transfer, **changes)  # type: ignore[arg-type]


def test_a_slow_link_wants_the_dense_codec_a_fast_one_raw() -> None:
    assert choose_codec(small(link_bytes_s=12.5e6)).codec == "bexp-zstd"
    assert choose_codec(small(link_bytes_s=1.25e9)).codec == "bexp3"
    assert choose_codec(small(link_bytes_s=25e9)).codec == "raw"


def test_a_codec_that_was_asked_for_is_used_whatever_it_costs() -> None:
    choice = choose_codec(small(asked="bexp-zstd", link_bytes_s=1e11))
    assert (choice.codec, choice.reason, choice.alternatives) == ("bexp-zstd", "asked for", ())


def test_a_prefill_that_hides_the_wire_makes_raw_enough() -> None:
    """64 MiB in 0.55 s at 1 Gbit/s: exposed while nothing hides them, not while the prefill takes 2 s."""
    assert choose_codec(small()).codec != "raw"
    hidden = choose_codec(small(hidden_s=2.0, frame_bytes=16 << 10))
    assert hidden.codec == "raw"
    assert "prefill hides 2,000 ms" in hidden.reason


def test_the_reason_names_codecs_times_and_link() -> None:
    reason = choose_codec(small(link_measured=False)).reason
    assert "bexp-zstd leaves " in reason
    assert "raw " in reason
    assert "(1 Gbit/s assumed)" in reason
    assert choose_codec(small(codecs=(RAW_COST, LOSSY))).reason == "no other lossless codec in common"


def test_a_correction_counts_for_the_choice_and_not_for_the_model() -> None:
    slow = replace(FAST, correction=3.0)
    transfer = small(codecs=(RAW_COST, slow))
    assert exposed_seconds(transfer, slow) == exposed_seconds(transfer, FAST)
    choice = choose_codec(transfer)
    assert choice.codec == "raw"
    assert choice.alternatives[0].exposed_s == 3 * exposed_seconds(transfer, FAST)


def test_a_trembling_estimate_does_not_flip_the_choice() -> None:
    for codec in ("bexp3", "bexp-zstd"):
        even = codec_break_even(small(codecs=(RAW_COST, FAST if codec == "bexp3" else DENSE)), codec)
        assert even is not None
        draw = random.Random(5)
        last, flips = "raw", 0
        for _ in range(500):
            link = even / 1.02 * draw.uniform(0.995, 1.005)
            costs = (RAW_COST, FAST if codec == "bexp3" else DENSE)
            choice = choose_codec(small(codecs=costs, link_bytes_s=link, last=last))
            flips += choice.codec != last
            last = choice.codec
        assert flips <= 1


@unhurried
@given(snapshots, st.floats(1.0, 1e5), st.integers(1, 20_000), st.integers(0, 20_000))
def test_transfer_or_recompute(transfer: TransferSnapshot, rate: float, tokens: int, queued: int) -> None:
    choice = transfer_or_recompute(transfer, tokens=tokens, prefill_tokens_s=rate, queued_tokens=queued)
    fetch = transfer.hidden_s + choose_codec(transfer).exposed_s
    assert choice.transfer_s == fetch
    assert choice.recompute_s == pytest.approx((tokens + queued) / rate)
    assert choice.recompute == (choice.recompute_s * (1 + TRANSFER_MARGIN) < fetch)
    assert f"{tokens} tokens" in choice.reason


@unhurried
@given(snapshots)
def test_below_the_break_even_the_codec_wins_and_above_it_does_not(transfer: TransferSnapshot) -> None:
    costs = {codec.name: codec for codec in transfer.codecs}
    even = codec_break_even(transfer, "bexp3")

    def saves(link: float) -> float:
        here = replace(transfer, link_bytes_s=link)
        return exposed_seconds(here, costs[RAW]) - exposed_seconds(here, costs["bexp3"])

    tolerance = 1e-9 + 1e-6 * exposed_seconds(replace(transfer, link_bytes_s=1e12), costs[RAW])
    if even is None:
        assert saves(1e6) <= tolerance
    elif even < 1e11:
        assert saves(even / 1.01) > -tolerance
        for factor in (1.01, 2, 10, 100):
            assert saves(even * factor) <= tolerance


def test_break_even_of_a_long_transfer_is_what_the_slower_end_of_the_codec_does() -> None:
    """With many frames the slowest stage is all that counts: raw is faster once the link outruns the codec."""
    for codec in (FAST, DENSE):
        even = codec_break_even(small(raw_bytes=1 << 33, codecs=(RAW_COST, codec)), codec.name)
        assert even == pytest.approx(min(codec.encode_bytes_s, codec.decode_bytes_s), rel=0.01)


def test_break_even_never_and_always() -> None:
    useless = CodecCost("zstd", 1.0, 1e8, 1e8)
    assert codec_break_even(small(codecs=(RAW_COST, useless)), "zstd") is None
    free = CodecCost("zstd", 2.0, 1e12, 1e12)
    assert codec_break_even(small(codecs=(RAW_COST, free)), "zstd") == math.inf


def test_rebuild_break_even() -> None:
    transfer = small(raw_bytes=1000 * 23_040)
    even = rebuild_break_even(transfer, tokens=1000, prefill_tokens_s=2000)
    assert even is not None
    for link, recompute in ((even / 1.05, True), (even * 1.05, False)):
        here = replace(transfer, link_bytes_s=link)
        assert transfer_or_recompute(here, tokens=1000, prefill_tokens_s=2000).recompute is recompute


def test_the_table_is_what_the_choice_says() -> None:
    rows = break_even_table(
        [RAW_COST, FAST, DENSE, LOSSY],
        bytes_per_token=23_040,
        frame_bytes=256 << 10,
        links_bytes_s=[1e7, 1e9, 1e11],
        token_counts=[128, 4096],
    )
    assert [(row.link_bytes_s, row.tokens) for row in rows] == [
        (link, tokens) for link in (1e7, 1e9, 1e11) for tokens in (128, 4096)
    ]
    for row in rows:
        times = {item.codec: item.exposed_s for item in row.exposed_s}
        assert set(times) == {"raw", "bexp3", "bexp-zstd"}
        assert times[row.codec] <= 1.05 * min(times.values()) + WORTH_S
    assert rows[0].codec == "bexp-zstd"
    assert rows[-1].codec == "raw"
    hidden = break_even_table(
        [RAW_COST, FAST],
        bytes_per_token=23_040,
        frame_bytes=256 << 10,
        links_bytes_s=[1e9],
        token_counts=[4096],
        prefill_tokens_s=1000,
    )
    assert hidden[0].codec == "raw"
