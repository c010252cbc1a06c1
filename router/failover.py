"""Several routers seen from a client: which one a call begins at, and which comes after it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import grpc

from pdcore.errors import Draining, RequestCancelled, Unavailable
from router.wire_errors import error_of

Router = TypeVar("Router")


REST_S = 5.0
"""A router that drains is asked last for so long, or as long as it says if that is longer."""
LONGEST_S = 1e9
"""What is longer is no bound: gRPC takes a deadline past the year 2262 for one that has passed."""


class Rotation(Generic[Router]):
    """Every call begins at the next router, so that each gets its share; the others follow in order.

    One that said it drains comes last for a while: it may still be needed, and may be back under the same address
    later. Thread-safe.

    Once it is closed, `take`, `failed` and `check_open` raise RequestCancelled: both clients end like that then.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, routers: Sequence[Router], now: Callable[[], float] = time.monotonic) -> None:
        self._routers = list(routers)
        self._calls = itertools.count()
        self._now = now
        self._rest_until = [-math.inf] * len(self._routers)
        self._closed = False

    def close(self) -> None:
        """No more calls begin."""
        self._closed = True

    def check_open(self) -> None:
        """Raises RequestCancelled if it is closed."""
        if self._closed:
            raise RequestCancelled("the client is closed")

    def take(self) -> Iterator[tuple[Router, bool]]:
        """Each router once, and whether it is the last."""
        first, count, now = next(self._calls), len(self._routers), self._now()
        order = [(first + offset) % count for offset in range(count)]
        order.sort(key=lambda place: self._rest_until[place] > now)  # the order stays among the others
        for place in order:
            self.check_open()
            yield self._routers[place], place == order[-1]

    def failed(self, router: Router, error: grpc.RpcError, final: bool) -> None:
        """A call at `router` has failed: raise what it means, unless the next router is to be tried."""
        self.check_open()
        failure = error_of(error)
        if isinstance(failure, Draining):
            self._rest_until[self._routers.index(router)] = self._now() + max(REST_S, failure.retry_after_s or 0.0)
        if final or not isinstance(failure, Unavailable):
            raise failure from error


def bounded(timeout_s: float | None) -> float | None:
    """A call's timeout in seconds as gRPC takes it; None for none, as for one beyond `LONGEST_S`.

    Raises ValueError for a number below 0, or none.
    """
    if timeout_s is None:
        return None
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s: a number of seconds >= 0, or None, is allowed, got {timeout_s}")
    return timeout_s if timeout_s <= LONGEST_S else None


class Deadline:
    """What is left of a call's time, over all routers that are tried. `timeout_s`: as `bounded` takes it."""

    def __init__(self, timeout_s: float | None) -> None:
        timeout_s = bounded(timeout_s)
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())
