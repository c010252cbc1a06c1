"""Several routers seen from a client: which one a call begins at, and which comes after it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import grpc

from pdcore.errors import Unavailable
from router.wire_errors import error_of

Router = TypeVar("Router")


class Rotation(Generic[Router]):
    """Every call begins at the next router, so that each gets its share; the others follow in order. Thread-safe."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = list(routers)
        self._calls = itertools.count()

    def take(self) -> Iterator[tuple[Router, bool]]:
        """Each router once, and whether it is the last."""
        first, count = next(self._calls), len(self._routers)
        for offset in range(count):
            yield self._routers[(first + offset) % count], offset + 1 == count


class Deadline:
    """What is left of a call's time, over all routers that are tried."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def raise_unless_next(error: grpc.RpcError, final: bool) -> None:
    """A call has failed: raise what it means, unless the next router is to be tried."""
    failure = error_of(error)
    if final or not isinstance(failure, Unavailable):
        raise failure from error
