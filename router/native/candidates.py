"""`router.candidates.Candidates` for the policy ``cost``, in C: the same choices at the same costs, to the bit."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import numpy as np

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
    mixed_draw,
)

if TYPE_CHECKING:
    from router.policy import RouteRequest


_CHOICE = struct.Struct("PPNPPP4dQPQQP")
"""``struct choice`` of routing.c."""
_PRICES = struct.pack("6dQ", PRICED_TOKENS, WORK_PRICE, HERE_PRICE, STREAM_PRICE, ALIKE, MOST, SPREAD)
"""``struct prices``."""
_PRICES_AT = ctypes.cast(ctypes.c_char_p(_PRICES), ctypes.c_void_p).value
_FLOAT64 = np.dtype(np.float64)


class Workspace:
    """Where C leaves the results of a choice, as long as a fleet's columns."""

    def __init__(self, size: int) -> None:
        scratch = np.empty(5 * size + 6)
        self.address = address(scratch)
        self.best = scratch.data[5 * size :]


class NativeCandidates:
    """See `router.candidates.Candidates`. The fleet must not change meanwhile, and there is one of them at a time."""

    def __init__(self, library: ctypes.PyDLL, request: RouteRequest, fleet: Fleet) -> None:
        self._library = library
        self._links = request.links
        size = len(fleet)
        # Kept, for the structure holds their addresses only.
        self._cached = None if request.cached is None else _column(request.cached, size)
        self._exclude = fleet.mask_of(request.exclude) if request.exclude else None
        self._avoid = fleet.mask_of(request.avoid) if request.avoid else None
        if fleet.workspace is None:
            fleet.workspace = Workspace(size)
        self._best = fleet.workspace.best
        self._choice = _CHOICE.pack(
            *fleet.addresses,
            size,
            address(self._cached),
            address(self._exclude),
            address(self._avoid),
            request.prompt_tokens,
            request.total_tokens,
            request.samples - 1,
            request.itl_ms,
            mixed_draw(request.draw),
            _PRICES_AT,
            request.interactive,
            fleet.decoders,
            fleet.workspace.address,
        )
        self._there: int = library.pdrt_survey(self._choice)

    def any(self, kind: int) -> bool:
        return bool(self._there & kind)

    def prefill(self, kinds: int) -> Best | None:
        self._library.pdrt_prefill(self._choice, kinds)
        return self._told()

    def decode(self, kinds: int, first: Best | None) -> Best | None:
        usual, links, computed_ms = 0.0, None, 0.0
        if self._links is not None and first is not None:
            usual, links = self._links.usual, self._links.of(first.number)
            computed_ms = first.computing_ms
        linked = 0 if links is None else len(links)
        self._library.pdrt_decode(self._choice, kinds, address(links), linked, usual, computed_ms)
        return self._told()

    def whole(self, kinds: int) -> Best | None:
        self._library.pdrt_whole(self._choice, kinds)
        return self._told()

    def _told(self) -> Best | None:
        best = self._best
        number = int(best[0])
        return Best(number, best[1], best[2], best[3], best[4], best[5]) if number >= 0 else None


def native_candidates(request: RouteRequest, fleet: Fleet) -> NativeCandidates | None:
    """None if there is no native code for this: no library, or another policy."""
    if request.policy != "cost":
        return None
    library = routing_library()
    return None if library is None else NativeCandidates(library, request, fleet)


def _column(column: Column, size: int) -> Column:
    """As C reads it."""
    if column.shape != (size,):
        raise ValueError(f"a column of shape {column.shape} for {size} workers")
    flags = column.flags
    if column.dtype is _FLOAT64 and flags.c_contiguous and flags.writeable:
        return column
    return np.array(column, np.float64)
