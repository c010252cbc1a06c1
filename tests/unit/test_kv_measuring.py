"""What a sender learns from its frames, on links and receivers that are simulated in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest

from kv_transfer.measuring import (
    LINK_HALF_LIFE_S,
    WINDOW_SAMPLES,
    WINDOWS,
    LinkMeter,
    MedianQuotient,
    PrefillPace,
    Quotient,
)

FRAME = 256 << 10
ASSUMED = 1.25e9


@dataclass
class Way:
    """A link of `link_bytes_s` with `latency_s` each way, behind an encoder and before a decoder, with `credit`.

    Arrivals and answers are told up to `jitter_s` late.
    """

    link_bytes_s: float
    encode_bytes_s: float = 5e9
    decode_bytes_s: float = 5e9
    latency_s: float = 0.0001
    credit: int = 32 * FRAME
    jitter_s: float = 0.0
    frame_bytes: int = FRAME

    def run(self, meter: LinkMeter, frames: int, start: float = 0.0, seed: int = 1) -> float:
        """Send so many frames through it, telling the meter; returns when the last answer is here."""
        draw = random.Random(seed)
        clock = encoder = link = decoder = start
        answers: list[tuple[float, int, float]] = []  # (back at the sender, frame, held)
        in_flight = 0
        for index in range(frames):
            while in_flight + self.frame_bytes > self.credit:
                clock, frame, held = heapq.heappop(answers)
                meter.answered(frame, held, clock)
                in_flight -= self.frame_bytes
            encoder = max(encoder, clock) + self.frame_bytes / self.encode_bytes_s
            while answers and answers[0][0] <= encoder:
                at, frame, held = heapq.heappop(answers)
                meter.answered(frame, held, at)
                in_flight -= self.frame_bytes
            meter.posted(index, self.frame_bytes, encoder)
            in_flight += self.frame_bytes
            link = max(link, encoder) + self.frame_bytes / self.link_bytes_s
            arrived = link + self.latency_s + draw.uniform(0, self.jitter_s)
            decoder = max(decoder, arrived) + self.frame_bytes / self.decode_bytes_s
            heapq.heappush(
                answers, (decoder + self.latency_s + draw.uniform(0, self.jitter_s), index, decoder - arrived)
            )
        while answers:
            clock, frame, held = heapq.heappop(answers)
            meter.answered(frame, held, clock)
        return clock


@pytest.mark.parametrize("gbit", [0.05, 0.25, 1, 5])
@pytest.mark.parametrize("jitter_s", [0.0, 0.0005])
def test_a_link_that_frames_wait_for_is_measured(gbit: float, jitter_s: float) -> None:
    meter = LinkMeter(ASSUMED)
    end = Way(gbit * 125e6, jitter_s=jitter_s).run(meter, 200)
    assert meter.measured(end)
    assert meter.bytes_s(end) == pytest.approx(gbit * 125e6, rel=0.15)
    assert meter.in_flight_bytes == 0


@pytest.mark.parametrize("jitter_s", [0.0, 0.0005])
def test_a_slow_receiver_is_no_slow_link(jitter_s: float) -> None:
    """The decoder takes 50 MB/s; a link of 1 GB/s must not be taken for one of 50 MB/s, credit used up or not."""
    for credit in (8 * FRAME, 1000 * FRAME):
        meter = LinkMeter(ASSUMED)
        end = Way(1e9, decode_bytes_s=50e6, credit=credit, jitter_s=jitter_s).run(meter, 200)
        assert meter.bytes_s(end) > 0.6e9


def test_a_slow_encoder_says_nothing_about_the_link() -> None:
    """Frames that never wait for the link leave it at what was assumed, long latency or not."""
    for latency_s in (0.0001, 0.02):
        meter = LinkMeter(ASSUMED)
        end = Way(2e9, encode_bytes_s=100e6, latency_s=latency_s).run(meter, 200)
        assert not meter.measured(end)
        assert meter.bytes_s(end) == ASSUMED


def test_a_link_faster_than_assumed_is_found_out() -> None:
    meter = LinkMeter(ASSUMED)
    end = Way(10e9, encode_bytes_s=100e6, latency_s=0.00001).run(meter, 50)
    assert meter.bytes_s(end) > 2 * ASSUMED


def test_it_follows_a_link_that_changes() -> None:
    meter = LinkMeter(ASSUMED)
    end = Way(1e9).run(meter, 100)
    end = Way(50e6).run(meter, 100, start=end + 1)
    assert meter.bytes_s(end) == pytest.approx(50e6, rel=0.3)
    end = Way(1e9).run(meter, 100, start=end + 1)
    assert meter.bytes_s(end) == pytest.approx(1e9, rel=0.3)


def test_what_is_old_fades_into_what_was_assumed() -> None:
    meter = LinkMeter(ASSUMED)
    end = Way(50e6).run(meter, 100)
    assert meter.measured(end + 0.9 * LINK_HALF_LIFE_S)
    assert not meter.measured(end + 1.1 * LINK_HALF_LIFE_S)
    assert meter.bytes_s(end + 20 * LINK_HALF_LIFE_S) == pytest.approx(ASSUMED, rel=0.01)


def test_lost_and_unknown_frames() -> None:
    meter = LinkMeter(ASSUMED)
    meter.posted("a", FRAME, 1.0)
    meter.posted("b", FRAME, 1.0)
    meter.lost("a")
    meter.answered("a", 0.0, 2.0)
    meter.lost("never posted")
    assert meter.in_flight_bytes == FRAME
    meter.reset()
    assert meter.in_flight_bytes == 0
    meter.answered("b", 0.0, 2.0)
    assert not meter.measured(2.0)


def test_a_quotient_weighs_samples_by_size() -> None:
    quotient = Quotient(100.0, half_life_s=10.0)
    assert (quotient.value(0.0), quotient.weight(0.0)) == (100.0, 0.0)
    quotient.add(1e6, 1.0, 0.0)
    quotient.add(1.0, 1e-9, 0.0)  # a wild quotient of a tiny sample
    assert quotient.value(0.0) == pytest.approx(1e6, rel=0.05)
    assert quotient.value(10.0) == pytest.approx((1e6 * 100) ** 0.5, rel=0.05)
    assert quotient.value(1000.0) == pytest.approx(100.0)
    quotient.add(5.0, 1.0, 1000.0)  # what is that old does not hold out against it
    assert quotient.value(1000.0) == pytest.approx(5.0)


def test_a_quotient_forgets() -> None:
    quotient = Quotient(1.0, half_life_s=1e9)
    for _ in range(200):
        quotient.add(10.0, 1.0, 0.0)
    for _ in range(150):
        quotient.add(20.0, 1.0, 0.0)
    assert quotient.value(0.0) == pytest.approx(20.0, rel=0.02)


def test_a_median_is_not_moved_by_stalls_and_bursts() -> None:
    quotient = MedianQuotient(1.0, half_life_s=1e9)
    quotient.add(50.0, 1.0, 0.0)
    assert quotient.value(0.0) == pytest.approx(50.0)  # before a window is full
    for sample in range(WINDOWS * WINDOW_SAMPLES):
        slow = sample // WINDOW_SAMPLES in (1, 4)
        quotient.add(1.0 if slow else 100.0, 1.0 if sample != 3 else 0.5, 0.0)
    assert quotient.value(0.0) == pytest.approx(100.0, rel=0.15)
    for _ in range(WINDOWS * WINDOW_SAMPLES):
        quotient.add(20.0, 1.0, 0.0)
    assert quotient.value(0.0) == pytest.approx(20.0)


def test_an_old_median_does_not_hold_out() -> None:
    quotient = MedianQuotient(7.0, half_life_s=10.0)
    for _ in range(WINDOWS * WINDOW_SAMPLES):
        quotient.add(1000.0, 1.0, 0.0)
    assert quotient.value(9.0) > 90
    assert quotient.value(1e4) == pytest.approx(7.0)
    quotient.add(20.0, 1.0, 11.0)
    assert quotient.value(11.0) == pytest.approx(20.0)


def test_prefill_pace() -> None:
    pace = PrefillPace()
    assert pace.seconds_per_token is None
    pace.add(128, 0.5)
    pace.add(128, 0.7)
    assert pace.seconds_per_token == pytest.approx(1.2 / 256, rel=0.02)
