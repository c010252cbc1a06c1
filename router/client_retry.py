"""When a client tries again what was refused: the cluster's hint, a backoff, and their bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdcore.errors import Overloaded, RequestError, Unavailable

SPREAD = 0.25
"""A wait is up to this share longer: those that were sent away together do not come back together."""
MAX_BACKOFF_S = 8.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again when the cluster is overloaded or unavailable and nothing of the answer has come.

    The error may say when to come again: not before that. Each try also waits twice as long as the one before it,
    `MAX_BACKOFF_S` at most unless the hint is longer. A call ends with its last error once one of the bounds is
    reached, or its deadline would be.

    Args:
        attempts: tries of a call in all. max_wait_s: seconds that a call may wait between them, in all.
        first_wait_s: the first of the backoffs.
    """

    attempts: int = 8
    max_wait_s: float = 60.0
    first_wait_s: float = 0.25

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_wait_s < 0 or self.first_wait_s <= 0:
            raise ValueError(f"attempts >= 1, max_wait_s >= 0 and first_wait_s > 0 are allowed, got {self}")

    def wait_s(
        self, error: RequestError, tried: int, waited_s: float, left_s: float | None, draw: float
    ) -> float | None:
        """Seconds to wait before the next try; None: `error` is what the call ends with.

        Args:
            tried: tries so far, from 1. waited_s: between them. left_s: until the call's deadline, None for none.
            draw: a number in [0, 1), for the spread.
        """
        if tried >= self.attempts or not isinstance(error, Overloaded | Unavailable):
            return None
        backoff = min(MAX_BACKOFF_S, self.first_wait_s * 2.0 ** min(tried - 1, 30))
        hint = error.retry_after_s or 0.0
        wait = max(hint, backoff) * (1.0 + SPREAD * draw)
        if waited_s + wait > self.max_wait_s or (left_s is not None and wait >= left_s):
            return None
        return wait


NEVER = Retry(attempts=1)
