"""`router.candidates.Candidates` for the policy ``cost``, in C: the same choices at the same costs, to the bit."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import numpy as np

from router.candidates import NOTHING_AHEAD, Ahead
from router.fleet import Column, Fleet
from router.native.library import address, routing_library
from router.ranking import (
    ALIKE,
    HERE_PRICE,
    MOST,
    PRICED_TOKENS,
    SPREAD,
    STREAM_PRICE,
    WORK_PRICE,
    Best,
)

if TYPE_CHECKING:
    from router.policy import RouteRequest


_FLEET = struct.Struct("PPNPP")
"""``struct fleet`` of routing.c."""
_CHOICE = struct.Struct("PPPP4d3QPNd3Q")
"""``struct choice``."""
_BEST = struct.Struct("q5d")
"""``struct best``."""
_PREFILL_AHEAD, _DECODE_AHEAD, _WHOLE_AHEAD, _ASKED = (number * _BEST.size for number in range(4))
"""Where the answers are: ``enum answer``."""
_PRICES = struct.pack("6dQ", PRICED_TOKENS, WORK_PRICE, HERE_PRICE, STREAM_PRICE, ALIKE, MOST, SPREAD)
"""``struct prices``."""
_WORD = (1 << 64) - 1
_NOBODY_YET = Best(-1, 0.0)
_new_tuple = tuple.__new__  # a third of the time that `Best._make` takes


class Workspace:
    """Where C finds a fleet's columns, as long as they are these, and leaves the results of a choice.

    Attributes:
        fleet: address of a ``struct fleet``. answers: memory of several ``struct best``.
        cached: a column for cached tokens. cached_at: its address.
    """

    def __init__(self, fleet: Fleet) -> None:
        size = len(fleet)
        scratch, cached = np.empty(5 * size + 4 * _BEST.size // 8), np.empty(size)
        self.answers = scratch.data[5 * size :].cast("B")
        self.cached, self.cached_at = cached.data, address(cached)
        self._kept = _FLEET.pack(*fleet.addresses, size, _at(_PRICES), address(scratch))
        self.fleet = _at(self._kept)


class NativeCandidates:
    """See `router.candidates.Candidates`. The fleet must not change meanwhile, and there is one of them at a time.

    Args:
        ahead: what will be asked for, most likely. It is found in one call together with what `any` tells; each
            other question takes one of its own.
    """

    __slots__ = ("_ahead", "_answers", "_choice", "_first", "_kept", "_library", "_there")

    def __init__(
        self, library: ctypes.PyDLL, request: RouteRequest, fleet: Fleet, ahead: Ahead = NOTHING_AHEAD
    ) -> None:
        workspace = fleet.workspace
        if workspace is None:
            workspace = fleet.workspace = Workspace(fleet)
        cached, exclude, avoid, links = request.cached, None, None, request.links
        if cached is not None:
            try:
                workspace.cached[:] = cached.data  # cheaper than to find out whether C could read it, and where it is
            except ValueError:  # of another type or length
                workspace.cached[:] = _column(cached, len(fleet)).data
        if request.exclude or request.closed is not None:
            exclude = fleet.mask_of(request.exclude, request.closed)
        if request.avoid:
            avoid = fleet.mask_of(request.avoid)
        self._library = library
        self._answers = workspace.answers
        self._ahead = ahead
        self._first: Best | None = _NOBODY_YET  # from whom the decode worker was looked for ahead, once asked for
        self._kept = workspace, exclude, avoid, links  # for the structure holds their addresses only
        self._choice = _CHOICE.pack(
            workspace.fleet,
            0 if cached is None else workspace.cached_at,
            0 if exclude is None else address(exclude),
            0 if avoid is None else address(avoid),
            request.prompt_tokens,
            request.total_tokens,
            request.samples - 1,
            request.itl_ms,
            request.draw & _WORD,
            request.interactive,
            fleet.decoders,
            0 if links is None else links.rows_at,
            0 if links is None else links.rows,
            0.0 if links is None else links.usual,
            *ahead,
        )
        self._there: int = library.pdrt_look(self._choice)

    def any(self, kind: int) -> bool:
        return self._there & kind != 0

    def prefill(self, kinds: int) -> Best | None:
        if kinds == self._ahead[0]:
            self._first = first = self._answer(_PREFILL_AHEAD)
            return first
        self._library.pdrt_prefill(self._choice, kinds)
        return self._answer(_ASKED)

    def decode(self, kinds: int, first: Best | None) -> Best | None:
        if kinds == self._ahead[1] and first is self._first:
            return self._answer(_DECODE_AHEAD)
        if first is None:
            self._library.pdrt_decode(self._choice, kinds, -1, 0.0)
        else:
            self._library.pdrt_decode(self._choice, kinds, first.number, first.computing_ms)
        return self._answer(_ASKED)

    def whole(self, kinds: int) -> Best | None:
        if kinds == self._ahead[2]:
            return self._answer(_WHOLE_AHEAD)
        self._library.pdrt_whole(self._choice, kinds)
        return self._answer(_ASKED)

    def _answer(self, at: int) -> Best | None:
        values = _BEST.unpack_from(self._answers, at)
        return None if values[0] < 0 else _new_tuple(Best, values)


def native_candidates(request: RouteRequest, fleet: Fleet, ahead: Ahead = NOTHING_AHEAD) -> NativeCandidates | None:
    """None if there is no native code for this: no library, or another policy."""
    if request.policy != "cost":
        return None
    library = routing_library()
    return None if library is None else NativeCandidates(library, request, fleet, ahead)


def _column(column: Column, size: int) -> Column:
    """As C reads it."""
    if column.shape != (size,):
        raise ValueError(f"a column of shape {column.shape} for {size} workers")
    return np.array(column, np.float64)


def _at(data: bytes) -> int:
    """Of the first byte, as long as the object lives."""
    where = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert where is not None
    return where
