"""How a request runs, and on which workers: a pure choice from what is known of them.

A request runs in one of two modes::

    disaggregated   prefill worker P computes the prompt and ships its KV to decode worker D
    local           one worker does both: an aggregated or a decode worker, or a prefill worker if there is neither

Here is which workers could take it, and in which mode; which of them is the best is `router.ranking`'s business.

Where both pools serve, the mode is `router.disaggregate`'s: ``always``, or (``auto``) what costs less by prediction.
Local saves the second worker's queue, the handover and the transfer; it costs the streams that run there, and where
its longest step would be longer than their inter-token objective, it is out of the question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np

from router.fleet import Column, Fleet, Mask
from router.links import Links
from router.ranking import Best, Ranking, Wanted


class Mode(StrEnum):
    """How a request runs; the value is what the timeline shows."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the choice depends on.

    Attributes:
        prompt_tokens: tokens to compute before a new one is sampled, delivered ones included.
        total_tokens: prompt and output together, at most; a worker that decodes must be able to hold them.
        samples: that go on from the prompt; a ticket has a block for each of them beside the prompt's.
        resumes: tokens were delivered already; the request is replayed locally from prompt + delivered.
        interactive: batch requests give way to it, also where it needs a ticket.
        rebuild: a KV transfer failed, and the decode side is to compute the prompt itself.
        local_only: disaggregation was found impossible for it.
        exclude: workers that must not be taken. avoid: workers taken only if there is no other.
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


@dataclass(frozen=True, slots=True)
class Route:
    """The choice. `prefill` is None in local mode; `reason` says why this mode.

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


def choose(request: RouteRequest, fleet: Fleet) -> Route | NoRoute:
    """Choose the best workers that can start `request` now; the fleet must be settled."""
    return _Choice(request, fleet).choose()


class _Choice:
    """One choice, and what is computed of all workers for it."""

    def __init__(self, request: RouteRequest, fleet: Fleet) -> None:
        self._request = request
        self._fleet = fleet
        self._ranking = Ranking(request.policy, request.wanted, fleet)

    def choose(self) -> Route | NoRoute:
        request, fleet = self._request, self._fleet
        excluded = fleet.mask_of(request.exclude) if request.exclude else None
        prefill_pool, decode_pool, aggregated = fleet.prefill, fleet.decode, fleet.aggregated
        if excluded is not None:
            prefill_pool, decode_pool, aggregated = (
                pool & ~excluded for pool in (prefill_pool, decode_pool, aggregated)
            )
        # A worker whose whole cache is too small would refuse the request for good.
        holds = fleet.capacity_tokens >= request.total_tokens
        prefill = prefill_pool & (fleet.capacity_tokens > request.prompt_tokens)
        decode, aggregated = decode_pool & holds, aggregated & holds
        runs_whole = decode | aggregated
        decoders = bool(fleet.decode.any() or fleet.aggregated.any())
        if not decoders:
            # Nobody who should decode serves. Prefill workers can as well, and then they do.
            runs_whole = prefill_pool & holds
        if request.rebuild:
            return self._local(runs_whole, "rebuild")
        # Tokens are delivered: their KV is gone, and the worker that goes on computes prompt and tokens again itself.
        if request.resumes:
            return self._local(runs_whole, "replay")
        if request.local_only:
            return self._local(runs_whole, "kv_reservation_too_large")
        if not decoders:
            return self._local(runs_whole, "decode_pool_empty")
        serves = bool(prefill.any())
        if serves and decode.any():
            # Samples of a request that runs as a whole wait for blocks one by one; a ticket has them all or none.
            if request.samples > 1:
                decode = decode & (self._ticket_tokens <= fleet.capacity_tokens)
                if not decode.any():
                    return self._local(runs_whole, "kv_reservation_too_large")
            return self._pools(prefill, decode, aggregated, runs_whole)
        if prefill_pool.any() and not serves:
            return self._local(aggregated if aggregated.any() else decode, "prompt_too_large_for_prefill_pool")
        if not aggregated.any():
            # Left out are those that have failed it, or have refused it a moment ago.
            return self._local(decode, "prefill_pool_left_out" if fleet.prefill.any() else "prefill_pool_empty")
        if not serves:
            return self._local(aggregated, "aggregated_pool")
        reason = "request_too_large_for_decode_pool" if decode_pool.any() else "decode_pool_empty"
        return self._local(aggregated, reason)

    # -- both pools serve ----------------------------------------------------------------------------------------

    def _pools(self, prefill: Mask, decode: Mask, aggregated: Mask, runs_whole: Mask) -> Route | NoRoute:
        request, ranking, fleet = self._request, self._ranking, self._fleet
        first = ranking.prefill(prefill & self._can_prefill)
        exposed_ms = self._exposed_ms(first)
        second = ranking.decode(decode & (fleet.room_tokens >= self._ticket_tokens), exposed_ms)
        if second is None and request.interactive:
            # Batch requests give way to an interactive one, but where there is room nobody has to.
            second = ranking.decode(decode & (fleet.room_if_given_way >= self._ticket_tokens), exposed_ms)
        if request.disaggregate == "always" or not fleet.measured:
            here, why = None, "prefill_pool_serves"
        else:
            here, why = self._here(runs_whole)
        if first is None or second is None:
            # Both pools serve but one is full: a worker that does both, if there is one, takes what they cannot.
            if here is not None:
                return self._route(here, None, "prefill_pool_full" if first is None else "decode_pool_full")
            if aggregated.any():
                return self._local(aggregated, "pools_full")
            return NoRoute(busy=True, reason="prefill pool full" if first is None else "decode pool full")
        if here is not None:
            if here.cost_ms < first.cost_ms + request.handover_ms + second.cost_ms:
                return self._route(here, None, self._saving(here, first, second))
            why = "cheaper_by_prediction"
        return self._route(second, first, why)

    def _here(self, among: Mask) -> tuple[Best | None, str]:
        """The worker that would run it as a whole, or why there is none."""
        objective, fleet = self._request.itl_ms, self._fleet
        if objective:
            # What streams run there must not be made wait for longer than they may.
            calm = (fleet.requests == 0) | (self._ranking.mixed_step_ms() <= objective)
            if not (among & calm).any():
                return None, "streams_keep_their_pace"
            among = among & calm
        here = self._ranking.whole(among & self._runs_whole_now)
        return here, "" if here is not None else "decode_pool_busy"

    def _exposed_ms(self, first: Best | None) -> Column | float:
        """What is left of the transfer to each worker when `first` has computed the prompt."""
        if self._request.links is None or first is None:
            return 0.0
        token_ms = self._request.links.token_ms(first.number, len(self._fleet))
        left = token_ms * self._ranking.lacking - self._ranking.computing_ms[first.number]
        return max(left, 0.0) if isinstance(left, float) else np.maximum(left, 0.0)

    def _saving(self, here: Best, first: Best, second: Best) -> str:
        """What running it as a whole saves most of."""
        request, computing, queued = self._request, self._ranking.computing_ms, self._fleet.queued_ms
        exposed_ms = self._exposed_ms(first)
        savings = {
            "prefill_pool_busy": queued[first.number] - queued[here.number],
            "cached_there": computing[first.number] - computing[here.number],
            "slow_link": exposed_ms if isinstance(exposed_ms, float) else exposed_ms[second.number],
            "short_prompt": request.handover_ms,
        }
        return max(savings, key=lambda reason: savings[reason])

    # -- one worker does both ------------------------------------------------------------------------------------

    def _local(self, among: Mask, reason: str) -> Route | NoRoute:
        if not among.any():
            return NoRoute(busy=False, reason="no worker that holds the whole request")
        best = self._ranking.whole(among & self._runs_whole_now)
        if best is None:
            return NoRoute(busy=True, reason="no room on the workers that run both phases")
        return self._route(best, None, reason)

    def _route(self, decode: Best, prefill: Best | None, reason: str) -> Route:
        where = self._fleet.id_of(decode.number)
        lacking = self._lacking(prefill or decode)
        if prefill is None:
            return Route(Mode.LOCAL, where, None, reason, self._request.rebuild, lacking)
        return Route(Mode.DISAGGREGATED, where, self._fleet.id_of(prefill.number), reason, lacking=lacking)

    def _lacking(self, worker: Best) -> int:
        lacking = self._ranking.lacking
        return int(lacking if isinstance(lacking, float) else lacking[worker.number])

    # -- who has room --------------------------------------------------------------------------------------------

    @cached_property
    def _can_prefill(self) -> Mask:
        return np.asarray(self._fleet.prompt_limit >= self._ranking.lacking)

    @cached_property
    def _runs_whole_now(self) -> Mask:
        """Able to compute the prompt, with room for it and a first new token."""
        fleet, tokens = self._fleet, self._request.prompt_tokens + 1
        # Batch requests give way to an interactive one.
        room = fleet.room_if_given_way if self._request.interactive else fleet.room_tokens
        return np.asarray(self._can_prefill & (room >= tokens))

    @property
    def _ticket_tokens(self) -> Column | int:
        """What a ticket takes: the prompt and a first new token, and a block more for each other sample."""
        tokens, others = self._request.prompt_tokens + 1, self._request.samples - 1
        return tokens + others * self._fleet.block_size if others else tokens
