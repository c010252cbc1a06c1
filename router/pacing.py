"""When a stream's next message may go out: at once, or with the tokens of the next few milliseconds if the router is
busy.

A message costs the same whether it has one token or ten. So a busy router writes to each stream at intervals, which
grow until it is not too busy any more; a stream to which nothing was written for an interval is never made to wait.
"""

from __future__ import annotations

BUSY, IDLE = 0.75, 0.5
"""Shares of its time for which the event loop wants a processor: above the one intervals grow, below the other they
shrink. In between they stay, so that they do not swing."""

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.0025, 0.04
"""The shortest interval but none at all. The longest leaves the router something of 50 ms to be late by itself."""


def next_interval(interval_s: float, busy: float) -> float:
    """The interval for the next time.

    Args:
        interval_s: that has been. busy: share of that time for which the event loop ran or waited for a processor.
    """
    if busy > BUSY:
        return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, 2 * interval_s))
    if busy < IDLE:
        shorter = interval_s / 2
        return 0.0 if shorter < MIN_INTERVAL_S else shorter
    return interval_s


def pause(interval_s: float, since_last_s: float) -> float:
    """Seconds for which a stream with news is to wait. `since_last_s`: since its last message went out."""
    return max(0.0, interval_s - since_last_s)
