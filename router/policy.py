"""How a request runs, and on which workers: a pure choice from what is known of them.

A request runs in one of two modes::

    disaggregated   prefill worker P computes the prompt and ships its KV to decode worker D
    local           one worker does both: an aggregated or a decode worker, or a prefill worker if there is neither

Here is in which mode it runs, and on which kinds of workers; who could take it is in `router.candidates`, and which
of them is the best is `router.ranking`'s business.

Where both pools serve, the mode is `router.disaggregate`'s: ``always``, or (``auto``) what costs less by prediction.
Local saves the second worker's queue, the handover and the transfer; it costs the streams that run there, and where
its longest step would be longer than their inter-token objective, it is out of the question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from router.candidates import NOTHING_AHEAD, Ahead, Candidates, Is
from router.fleet import Column, Fleet, Mask
from router.links import Links
from router.native.candidates import native_candidates
from router.ranking import Best, Wanted


class Mode(StrEnum):
    """How a request runs; the value is what the timeline shows."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(slots=True)  # not frozen: that would take four times as long to make
class RouteRequest:
    """What the choice depends on; never changed once it is made.

    Attributes:
        prompt_tokens: tokens to compute before a new one is sampled, delivered ones included.
        total_tokens: prompt and output together, at most; a worker that decodes must be able to hold them.
        samples: that go on from the prompt; a ticket has a block for each of them beside the prompt's.
        resumes: tokens were delivered already; the request is replayed locally from prompt + delivered.
        interactive: batch requests give way to it, also where it needs a ticket.
        rebuild: a KV transfer failed, and the decode side is to compute the prompt itself.
        local_only: disaggregation was found impossible for it.
        exclude: workers that must not be taken. avoid: workers taken only if there is no other.
        closed: rows of the fleet that must not be taken either; None if there are none.
        policy: how the best of those is found that could take it. cached, draw: see `Wanted`.
        links: what transfers between two workers take; None if nothing is known.
        disaggregate: ``always`` where both pools serve, or ``auto``.
        handover_ms: how long a second worker takes to go on, the KV's time on the link aside.
        itl_ms: objective of the streams that run; 0 if they have none.
    """

    prompt_tokens: int
    total_tokens: int
    samples: int = 1
    resumes: bool = False
    interactive: bool = False
    rebuild: bool = False
    local_only: bool = False
    exclude: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    closed: Mask | None = None
    policy: str = "cost"
    cached: Column | None = None
    draw: int = 0
    links: Links | None = None
    disaggregate: str = "always"
    handover_ms: float = 0.0
    itl_ms: float = 0.0

    @property
    def wanted(self) -> Wanted:
        """As `router.ranking` knows it."""
        return Wanted(self.prompt_tokens, self.cached, self.avoid, self.draw)


@dataclass(slots=True)  # not frozen, as above
class Route:
    """The choice, never changed once it is made. `prefill` is None in local mode; `reason` says why this mode.

    `rebuild`: the KV was computed before, and its transfer failed. `lacking`: prompt tokens to compute, those aside
    that are cached where it is computed.
    """

    mode: Mode
    decode: str
    prefill: str | None
    reason: str
    rebuild: bool = False
    lacking: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Nothing can start the request now. `busy`: suitable workers exist, but have no room at present."""

    busy: bool
    reason: str


class Seen(Protocol):
    """The workers as a request sees them: `router.candidates.Candidates`, or the same in C."""

    def any(self, kind: int) -> bool: ...
    def prefill(self, kinds: int) -> Best | None: ...
    def decode(self, kinds: int, first: Best | None) -> Best | None: ...
    def whole(self, kinds: int) -> Best | None: ...


def look(request: RouteRequest, fleet: Fleet, ahead: Ahead = NOTHING_AHEAD) -> Seen:
    """At the workers, by the fastest means."""
    return native_candidates(request, fleet, ahead) or Candidates(request, fleet)


def choose(
    request: RouteRequest, fleet: Fleet, look: Callable[[RouteRequest, Fleet, Ahead], Seen] = look
) -> Route | NoRoute:
    """Choose the best workers that can start `request` now; the fleet must be settled."""
    return _Choice(request, fleet, look(request, fleet, _ahead(request, fleet))).choose()


_PREFILLS_NOW: Final = Is.PREFILLS | Is.CAN_PREFILL
_WHOLE_NOW: Final = Is.WHOLE | Is.RUNS_WHOLE_NOW


def _ahead(request: RouteRequest, fleet: Fleet) -> Ahead:
    """What `_Choice` will ask for, unless some workers cannot take the request: then it asks anew."""
    if request.rebuild or request.resumes or request.local_only or not fleet.decoders:
        return 0, 0, _WHOLE_NOW
    if not (fleet.prefillers and fleet.decode_workers):
        return 0, 0, (Is.AGGREGATED if fleet.aggregated_workers else Is.DECODES) | Is.RUNS_WHOLE_NOW
    decode = (Is.DECODES_SAMPLES if request.samples > 1 else Is.DECODES) | Is.TAKES_TICKET
    if request.disaggregate == "always" or not fleet.measured:
        return _PREFILLS_NOW, decode, 0
    return _PREFILLS_NOW, decode, (Is.WHOLE_CALMLY if request.itl_ms else Is.WHOLE) | Is.RUNS_WHOLE_NOW


class _Choice:
    """One choice."""

    __slots__ = ("_fleet", "_request", "_seen")

    def __init__(self, request: RouteRequest, fleet: Fleet, seen: Seen) -> None:
        self._request = request
        self._fleet = fleet
        self._seen = seen

    def choose(self) -> Route | NoRoute:
        request, seen, fleet = self._request, self._seen, self._fleet
        if request.rebuild:
            return self._local(Is.WHOLE, "rebuild")
        # Tokens are delivered: their KV is gone, and the worker that goes on computes prompt and tokens again itself.
        if request.resumes:
            return self._local(Is.WHOLE, "replay")
        if request.local_only:
            return self._local(Is.WHOLE, "kv_reservation_too_large")
        if not fleet.decoders:
            return self._local(Is.WHOLE, "decode_pool_empty")
        serves, decode, aggregated = seen.any(Is.PREFILLS), Is.DECODES, seen.any(Is.AGGREGATED)
        if serves and seen.any(decode):
            # Samples of a request that runs as a whole wait for blocks one by one; a ticket has them all or none.
            if request.samples > 1:
                decode = Is.DECODES_SAMPLES
                if not seen.any(decode):
                    return self._local(Is.WHOLE, "kv_reservation_too_large")
            return self._pools(decode)
        if seen.any(Is.PREFILL_POOL) and not serves:
            return self._local(Is.AGGREGATED if aggregated else decode, "prompt_too_large_for_prefill_pool")
        if not aggregated:
            # Left out are those that have failed it, or have refused it a moment ago.
            return self._local(decode, "prefill_pool_left_out" if fleet.prefillers else "prefill_pool_empty")
        if not serves:
            return self._local(Is.AGGREGATED, "aggregated_pool")
        reason = "request_too_large_for_decode_pool" if seen.any(Is.DECODE_POOL) else "decode_pool_empty"
        return self._local(Is.AGGREGATED, reason)

    # -- both pools serve ----------------------------------------------------------------------------------------

    def _pools(self, decode: int) -> Route | NoRoute:
        request, seen = self._request, self._seen
        first = seen.prefill(_PREFILLS_NOW)
        second = seen.decode(decode | Is.TAKES_TICKET, first)
        if second is None and request.interactive:
            # Batch requests give way to an interactive one, but where there is room nobody has to.
            second = seen.decode(decode | Is.TAKES_TICKET_IF_GIVEN_WAY, first)
        if request.disaggregate == "always" or not self._fleet.measured:
            here, why = None, "prefill_pool_serves"
        else:
            here, why = self._here()
        if first is None or second is None:
            # Both pools serve but one is full: a worker that does both, if there is one, takes what they cannot.
            if here is not None:
                return self._route(here, None, "prefill_pool_full" if first is None else "decode_pool_full")
            if seen.any(Is.AGGREGATED):
                return self._local(Is.AGGREGATED, "pools_full")
            return NoRoute(busy=True, reason="prefill pool full" if first is None else "decode pool full")
        if here is not None:
            if here.cost_ms < first.cost_ms + request.handover_ms + second.cost_ms:
                return self._route(here, None, self._saving(here, first, second))
            why = "cheaper_by_prediction"
        return self._route(second, first, why)

    def _here(self) -> tuple[Best | None, str]:
        """The worker that would run it as a whole, or why there is none."""
        among = Is.WHOLE
        if self._request.itl_ms:
            # What streams run there must not be made wait for longer than they may.
            among = Is.WHOLE_CALMLY
            if not self._seen.any(among):
                return None, "streams_keep_their_pace"
        here = self._seen.whole(among | Is.RUNS_WHOLE_NOW)
        return here, "" if here is not None else "decode_pool_busy"

    def _saving(self, here: Best, first: Best, second: Best) -> str:
        """What running it as a whole saves most of."""
        savings = {
            "prefill_pool_busy": first.queued_ms - here.queued_ms,
            "cached_there": first.computing_ms - here.computing_ms,
            "slow_link": second.exposed_ms,
            "short_prompt": self._request.handover_ms,
        }
        return max(savings, key=lambda reason: savings[reason])

    # -- one worker does both ------------------------------------------------------------------------------------

    def _local(self, among: int, reason: str) -> Route | NoRoute:
        if not self._seen.any(among):
            return NoRoute(busy=False, reason="no worker that holds the whole request")
        best = self._seen.whole(among | Is.RUNS_WHOLE_NOW)
        if best is None:
            return NoRoute(busy=True, reason="no room on the workers that run both phases")
        return self._route(best, None, reason)

    def _route(self, decode: Best, prefill: Best | None, reason: str) -> Route:
        where = self._fleet.id_of(decode.number)
        lacking = int((prefill or decode).lacking)
        if prefill is None:
            return Route(Mode.LOCAL, where, None, reason, self._request.rebuild, lacking)
        return Route(Mode.DISAGGREGATED, where, self._fleet.id_of(prefill.number), reason, lacking=lacking)
