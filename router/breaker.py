"""A circuit breaker per worker: who fails time and again gets nothing for a while, then one request to try. Pure.

::

              `failures` in a row, or `share` of the last `window` verdicts
      CLOSED ---------------------------------------------------------------> OPEN
        ^ ^                                                                   |  ^
        | '------ the probe was served, or has run for `trust_s` ---.         |  | the probe failed:
        |                                                           |         |  | twice as long
        |                                                           |         v  |
        '- (a new incarnation begins here)                       HALF_OPEN <--'--'
                                                                     after `open_s`; the next request is the probe

What counts is how attempts end on a worker: *served* (its prefill was committed, its request came to a good end) or
*failed* (an error of its own, or its session was lost). Refusals for want of room, requests that could never run, and
what clients cancel say nothing of a worker's health. A failed transfer has two ends and one of them, or the link, is
to blame: it counts against a worker once transfers with two different peers have failed there since one succeeded,
or, for a prefill worker, if there is no other peer to find out by - the cluster can do without it.

A breaker never makes the cluster unavailable: whoever routes leaves out those that are `shunned` only while another
worker could take the request (`router.queue_pump`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from pdcore.types import RequestKey


class BreakerState(StrEnum):
    """See above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Bounds; times in seconds.

    Attributes:
        failures: in a row that open it. share: of the last `window` verdicts that were failures, which opens it too.
        open_s: for so long it gets nothing, at first; doubled after every probe that failed, up to `max_open_s`.
        trust_s: a probe that has run for so long without a verdict counts as served.
    """

    failures: int = 5
    share: float = 0.5
    window: int = 20
    open_s: float = 1.0
    max_open_s: float = 30.0
    trust_s: float = 10.0


class Breaker:
    """Of one incarnation of one worker. `now`: seconds on one monotonic clock.

    Attributes:
        last_failure: why it was opened last, or what counted last; for people.
    """

    def __init__(self, policy: BreakerPolicy) -> None:
        self.last_failure = ""
        self._policy = policy
        self._open_until: float | None = None  # None: closed
        self._openings = 0  # in a row, without a probe that was served
        self._in_a_row = 0
        self._verdicts: deque[bool] = deque(maxlen=policy.window)  # True: failed
        self._bad_peers: dict[str, int] = {}  # failed transfers with them since one with them succeeded
        self._probe: RequestKey | None = None
        self._probe_since = 0.0

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        if now < self._open_until:
            return BreakerState.OPEN
        if self._probe is not None and now >= self._probe_since + self._policy.trust_s:
            self._close()
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN

    def shunned(self, now: float) -> bool:
        """Whether it gets nothing while another worker could take it."""
        state = self.state(now)
        return state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._probe is not None)

    def started(self, key: RequestKey, now: float) -> bool:
        """An attempt is sent there. True if it is the probe."""
        if self.state(now) is not BreakerState.HALF_OPEN or self._probe is not None:
            return False
        self._probe, self._probe_since = key, now
        return True

    def served(self, key: RequestKey, now: float) -> None:
        """An attempt came to a good end there."""
        state = self.state(now)
        if state is BreakerState.CLOSED:
            self._in_a_row = 0
            self._verdicts.append(False)
        elif state is BreakerState.HALF_OPEN and key == self._probe:
            self._close()

    def ended(self, key: RequestKey) -> None:
        """An attempt is over there, and says nothing; another one may be the probe. Idempotent."""
        if key == self._probe:
            self._probe = None

    def failed(self, key: RequestKey | None, reason: str, now: float) -> None:
        """An attempt failed there, or its session was lost (`key` is None)."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return  # of what was sent there before
        if state is BreakerState.HALF_OPEN and key is not None and key != self._probe:
            return
        self.last_failure = reason
        if state is BreakerState.HALF_OPEN:
            self._open(now)
            return
        self._in_a_row += 1
        self._verdicts.append(True)
        policy = self._policy
        many = len(self._verdicts) == policy.window and sum(self._verdicts) >= policy.share * policy.window
        if self._in_a_row >= policy.failures or many:
            self._open(now)

    def transfer_failed(
        self, key: RequestKey, peer: str, reason: str, now: float, *, only_peer: bool = False
    ) -> None:
        """A transfer with `peer` failed. `only_peer`: this worker is the end to blame if no other peer can tell."""
        self._bad_peers[peer] = self._bad_peers.get(peer, 0) + 1
        if len(self._bad_peers) > 1 or only_peer:
            self.failed(key, reason, now)
        else:
            self.ended(key)

    def forget_peer(self, peer: str) -> None:
        """A transfer with `peer` has succeeded, or its failures are explained by its death."""
        self._bad_peers.pop(peer, None)

    def _open(self, now: float) -> None:
        pause = self._policy.open_s * 2.0 ** min(self._openings, 30)
        self._open_until = now + min(self._policy.max_open_s, pause)
        self._openings += 1
        self._probe = None

    def _close(self) -> None:
        self._open_until = self._probe = None
        self._openings = self._in_a_row = 0
        self._verdicts.clear()
        self._bad_peers.clear()
