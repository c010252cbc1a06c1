"""Several routers seen from a client: which one a call begins at, and which comes after it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import grpc

from pdcore.errors import Draining, Unavailable
from router.wire_errors import error_of

Router = TypeVar("Router")


REST_S = 5.0
"""A router that drains is asked last for so long, or as long as it says if that is longer."""


class Rotation(Generic[Router]):
    """Every call begins at the next router, so that each gets its share; the others follow in order.

    One that said it drains comes last for a while: it may still be needed, and may be back under the same address
    later. Thread-safe.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, routers: Sequence[Router], now: Callable[[], float] = time.monotonic) -> None:
        self._routers = list(routers)
        self._calls = itertools.count()
        self._now = now
        self._rest_until = [-math.inf] * len(self._routers)

    def take(self) -> Iterator[tuple[Router, bool]]:
        """Each router once, and whether it is the last."""
        first, count, now = next(self._calls), len(self._routers), self._now()
        order = [(first + offset) % count for offset in range(count)]
        order.sort(key=lambda place: self._rest_until[place] > now)  # the order stays among the others
        for place in order:
            yield self._routers[place], place == order[-1]

    def failed(self, router: Router, error: grpc.RpcError, final: bool) -> None:
        """A call at `router` has failed: raise what it means, unless the next router is to be tried."""
        failure = error_of(error)
        if isinstance(failure, Draining):
            self._rest_until[self._routers.index(router)] = self._now() + max(REST_S, failure.retry_after_s or 0.0)
        if final or not isinstance(failure, Unavailable):
            raise failure from error


class Deadline:
    """What is left of a call's time, over all routers that are tried."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())
