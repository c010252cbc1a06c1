"""What a sender learns of its codecs, its prefills and its links from the transfers themselves. Pure.

Everything is a quotient of sums (bytes over seconds, raw bytes over wire bytes) in which old samples fade, so that a
sample counts by its size and not by its own quotient, which may be wild. What has not been measured for a while fades
into what was assumed at the start: a number that nobody checks any more must not rule for ever.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

SAMPLES = 16
"""A sample's weight is 1/e after so many more."""
WINDOW_SAMPLES = 8
WINDOWS = 15
"""Of a bandwidth: the median of the last so many windows of so many samples."""
CODEC_HALF_LIFE_S = 60.0
"""Seconds without samples after which a codec's measured speed and its assumed one count the same."""
LINK_HALF_LIFE_S = 120.0
MEASURED_WEIGHT = 0.5
"""From this weight on a quotient counts as measured, not as assumed."""

_KEEP = math.exp(-1 / SAMPLES)
_LEAST_DELAY_SAMPLES = 1024


class _Fading:
    """A measurement that fades into an assumption while nothing is added to it."""

    def __init__(self, assumed: float, half_life_s: float) -> None:
        assert assumed > 0, assumed
        self.assumed = assumed
        self._half_life_s = half_life_s
        self._sampled_at: float | None = None

    def weight(self, now: float) -> float:
        """How much of the value was measured, 0 to 1."""
        if self._sampled_at is None:
            return 0.0
        return float(0.5 ** (max(0.0, now - self._sampled_at) / self._half_life_s))

    def _blend(self, measured: float, now: float) -> float:
        weight = self.weight(now)
        return math.exp(weight * math.log(measured) + (1 - weight) * math.log(self.assumed))


class Quotient(_Fading):
    """A fading quotient of two sums, and what to assume while there is none.

    Args:
        assumed: its value without samples, > 0.
        half_life_s: see `CODEC_HALF_LIFE_S`.
    """

    def __init__(self, assumed: float, half_life_s: float) -> None:
        super().__init__(assumed, half_life_s)
        self._above = self._below = 0.0

    def add(self, above: float, below: float, now: float) -> None:
        """Take a sample, both parts > 0, at clock reading `now`."""
        # An old quotient has as much weight as it has in `value`: it must not hold out against new samples.
        keep = _KEEP * self.weight(now)
        self._above = self._above * keep + above
        self._below = self._below * keep + below
        self._sampled_at = now

    def value(self, now: float) -> float:
        """Between what was measured and what was assumed, by the age of the last sample."""
        return self.assumed if self._sampled_at is None else self._blend(self._above / self._below, now)


class MedianQuotient(_Fading):
    """As `Quotient`, but the median of the quotients of windows of some samples each: a machine that stalls now and
    then, or a burst that a link lets through, moves a window or two, and the median hardly."""

    def __init__(self, assumed: float, half_life_s: float) -> None:
        super().__init__(assumed, half_life_s)
        self._windows: deque[float] = deque(maxlen=WINDOWS)
        self._above = self._below = 0.0
        self._count = 0

    def add(self, above: float, below: float, now: float) -> None:
        """Take a sample, both parts > 0, at clock reading `now`."""
        if self.weight(now) < MEASURED_WEIGHT:
            self._windows.clear()
            self._above = self._below = 0.0
            self._count = 0
        self._above += above
        self._below += below
        self._count += 1
        if self._count == WINDOW_SAMPLES:
            self._windows.append(self._above / self._below)
            self._above = self._below = 0.0
            self._count = 0
        self._sampled_at = now

    def value(self, now: float) -> float:
        """Between what was measured and what was assumed, by the age of the last sample."""
        if self._sampled_at is None:
            return self.assumed
        # Before the first window is full, its beginning has to do.
        return self._blend(statistics.median(self._windows or (self._above / self._below,)), now)


class PrefillPace:
    """Seconds that a prompt's token takes on this worker, as its request sees it: two prompts in one step take twice
    as long each. None while no chunk has been timed."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` tokens took `seconds`."""
        self._seconds = self._seconds * _KEEP + seconds
        self._tokens = self._tokens * _KEEP + tokens

    @property
    def seconds_per_token(self) -> float | None:
        return self._seconds / self._tokens if self._tokens else None


@dataclass(slots=True)
class _Flight:
    """A frame on its way."""

    wire_bytes: int
    posted_at: float


class LinkMeter:
    """Bandwidth of the way to one receiver: from the sender's outbox to the receiver's memory.

    Every answer says for how long the receiver held the frame after its last byte. So the sender knows when the frame
    arrived, on its own clock but for the way back, and a receiver that is slow to decode does not look like a slow
    link. (One that is slow to *read* does: it cannot be told apart, and comes to the same.)

    The time between two arrivals is the time that the later frame took on the link only if the link never waited for
    the sender between them: if the frame was posted before its predecessor arrived, and stood in line::

        posted     predecessor arrived    arrived
          |------------------|-- spacing --|        spacing: the frame's own time on the link, if it stood in line
          |------------- delay ------------|        before: delay >= least delay + 1.5 * spacing

    (Least delay: of a frame that found the link empty, its latency included.) Only such samples are taken. A frame
    that found an empty link says that the bandwidth is at least its bytes over its delay: taken as a sample if that
    is more than the present estimate. While nothing has saturated the link it is taken to be as fast as assumed: it
    then is not what transfers wait for. Credit that is used up delays the posting, not the frame: nothing is taken
    from frames that a slow receiver lets through one by one.

    Args:
        assumed_bytes_s: bandwidth while nothing is known.
    """

    def __init__(self, assumed_bytes_s: float) -> None:
        self._bandwidth = MedianQuotient(assumed_bytes_s, LINK_HALF_LIFE_S)
        self._flights: dict[Hashable, _Flight] = {}
        self._least_delay: float | None = None
        self._last_arrival: float | None = None
        self.in_flight_bytes = 0

    def bytes_s(self, now: float) -> float:
        """Bandwidth in bytes per second."""
        return self._bandwidth.value(now)

    def measured(self, now: float) -> bool:
        """The bandwidth was measured lately, not assumed."""
        return self._bandwidth.weight(now) >= MEASURED_WEIGHT

    def posted(self, frame: Hashable, wire_bytes: int, now: float) -> None:
        """A frame of `wire_bytes` was given to the transport."""
        self._flights[frame] = _Flight(wire_bytes, now)
        self.in_flight_bytes += wire_bytes

    def lost(self, frame: Hashable) -> None:
        """The frame is on the link no more, and nothing is known of it."""
        flight = self._flights.pop(frame, None)
        if flight is not None:
            self.in_flight_bytes -= flight.wire_bytes

    def reset(self) -> None:
        """The link is another one now, or its frames are lost; what is known of its speed stays."""
        self._flights.clear()
        self.in_flight_bytes = 0
        self._least_delay = self._last_arrival = None

    def answered(self, frame: Hashable, held_s: float, now: float) -> None:
        """The frame's answer is here; the receiver held it for `held_s` seconds. Ignored for unknown frames."""
        flight = self._flights.pop(frame, None)
        if flight is None:
            return
        self.in_flight_bytes -= flight.wire_bytes
        arrival = max(now - held_s, flight.posted_at)
        previous, self._last_arrival = self._last_arrival, max(arrival, self._last_arrival or arrival)
        delay = arrival - flight.posted_at
        least = delay if self._least_delay is None else min(delay, self._least_delay)
        # It creeps up, so that a way that has become longer is noticed.
        self._least_delay = least + (delay - least) / _LEAST_DELAY_SAMPLES
        if previous is not None and flight.posted_at < previous < arrival:
            spacing = arrival - previous
            if delay >= least + 1.5 * spacing:
                self._bandwidth.add(flight.wire_bytes, spacing, now)
            return
        if delay > 0 and flight.wire_bytes / delay > self.bytes_s(now):
            self._bandwidth.add(flight.wire_bytes, delay, now)
