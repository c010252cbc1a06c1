"""When an attempt that failed may be made again: backoff with jitter, and a budget for the whole cluster. Pure.

::

    replay    the first one at once, the next ones after a backoff; each also waits for its turn in the budget
    refusal   after a backoff: nothing was computed, so it costs the budget nothing

`router.max_replays` bounds how often, the client's deadline bounds how long: of what is left until then a backoff
takes half at most, so that there is time for the try that it waits for.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

JITTER = 0.5
"""A backoff is shortened by up to this share: what failed together does not come back together."""
BUDGET_WINDOW_S = 10.0
"""Seconds for which the budget remembers: the minimum rate saves up so much, and what starts earn fades as fast."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles from `first_s` to `most_s`, in seconds."""

    first_s: float
    most_s: float

    def delay_s(self, times: int, name: str, left_s: float = math.inf) -> float:
        """Seconds to wait before the try that follows the `times`-th failure (from 1).

        Args:
            name: of the try; the jitter is drawn from it, the same for the same name. left_s: until the deadline.
        """
        full = min(self.most_s, self.first_s * 2.0 ** min(times - 1, 30))
        draw = zlib.crc32(f"{name}/{times}".encode()) / 2**32
        return min(full * (1.0 - JITTER * draw), max(0.0, left_s) / 2)


REFUSED = Backoff(0.02, 0.5)
REPLAYED = Backoff(0.1, 2.0)


class RetryBudget:
    """How many replays there may be: a share of the requests that start, and a minimum rate beside it.

    When much fails at once, everything that ran there comes back at once; without a bound, replays would take the
    workers that are left from new requests, fail there for want of time, and come back again. Here a replay that is
    over the budget gets the earliest time at which the minimum rate alone will have paid for it. It is never
    dropped::

        balance  0 ........ per_s * window ......................>
                 the minimum rate fills it    what starts have earned above that fades, by e in a window
        < 0      that many replays have their turn to come, 1 / per_s apart

    So within any `t` seconds, replays whose turn comes are at most ``per_s * (window + t)`` and `share` of the starts
    of that time and (fading) of the time before it.

    Args:
        share: replays that a start earns. per_s: replays per second without any. now: seconds on the caller's clock,
            as everywhere here; it must not go back.
    """

    def __init__(self, share: float, per_s: float, now: float) -> None:
        assert share >= 0.0, share
        assert per_s > 0.0, per_s
        self._share = share
        self._per_s = per_s
        self._floor = per_s * BUDGET_WINDOW_S
        self._balance = self._floor
        self._at = now

    def balance(self, now: float) -> float:
        """Replays that may start at once; below 0, the replays whose turn is still to come."""
        elapsed, self._at = now - self._at, now
        if self._balance > self._floor:
            self._balance = self._floor + (self._balance - self._floor) * math.exp(-elapsed / BUDGET_WINDOW_S)
        else:
            self._balance = min(self._floor, self._balance + self._per_s * elapsed)
        return self._balance

    def started(self, now: float) -> None:
        """A request has started for the first time."""
        self._balance = self.balance(now) + self._share

    def turn(self, now: float) -> float:
        """One more replay is wanted: when it may start."""
        self._balance = self.balance(now) - 1.0
        return now + max(0.0, -self._balance) / self._per_s

    def given_back(self, now: float) -> None:
        """A replay whose turn had not come has ended."""
        self._balance = self.balance(now) + 1.0
