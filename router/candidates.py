"""Who could take a request, and who of these is the best, as columns of all workers: what a choice is made from.

`router.policy` asks whether there is anybody of a kind (`Is`), and for the best of those that are of several kinds
at once; `router.ranking` knows what is best. For the policy ``cost`` the same is there in C (`router.native`), which
does in some microseconds what takes numpy a few hundred; this is what that must agree with, to the bit, and what runs
where there is no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from router.fleet import Column, Fleet, Mask
from router.ranking import Best, Ranking

if TYPE_CHECKING:
    from router.policy import RouteRequest


class Is:
    """What a worker is to a request, as bits.

    Those up to WHOLE_CALMLY go by role, and nobody has them who is excluded; the others say what a worker does now,
    and mean something beside these only.

    Attributes:
        PREFILL_POOL, DECODE_POOL: of that role.
        PREFILLS: of the prefill pool, and its whole cache has room for the prompt.
        DECODES: of the decode pool, and its whole cache has room for prompt and output: a smaller one would refuse
            the request for good. DECODES_SAMPLES: and for the ticket of all its samples.
        AGGREGATED: of that role, and holds prompt and output.
        WHOLE: would run both phases: decode and aggregated workers that hold prompt and output. Where nobody serves
            who should decode, prefill workers can as well, and then they do.
        WHOLE_CALMLY: does so without making streams there wait for longer than they may.
        CAN_PREFILL: takes the prompt now.
        RUNS_WHOLE_NOW: and has room for it and a first new token; batch requests give way to an interactive one.
        TAKES_TICKET: has room for it now. TAKES_TICKET_IF_GIVEN_WAY: or would if its batch requests gave way.
    """

    PREFILL_POOL: Final = 1 << 0
    PREFILLS: Final = 1 << 1
    DECODE_POOL: Final = 1 << 2
    DECODES: Final = 1 << 3
    DECODES_SAMPLES: Final = 1 << 4
    AGGREGATED: Final = 1 << 5
    WHOLE: Final = 1 << 6
    WHOLE_CALMLY: Final = 1 << 7
    CAN_PREFILL: Final = 1 << 8
    RUNS_WHOLE_NOW: Final = 1 << 9
    TAKES_TICKET: Final = 1 << 10
    TAKES_TICKET_IF_GIVEN_WAY: Final = 1 << 11


Ahead = tuple[int, int, int]
"""Kinds that will be asked for, most likely: of a prefill worker, of the decode worker that it sends to, of one that
runs the request as a whole; 0 where nothing will. A hint, for those who find them faster together."""
NOTHING_AHEAD: Final[Ahead] = (0, 0, 0)


class Candidates:
    """All workers of a fleet, which must be settled, as one request sees them."""

    def __init__(self, request: RouteRequest, fleet: Fleet) -> None:
        self._request = request
        self._fleet = fleet
        self._ranking = Ranking(request.policy, request.wanted, fleet)
        self._excluded = fleet.mask_of(request.exclude, request.closed)
        self._masks: dict[int, Mask] = {}

    def any(self, kind: int) -> bool:
        """Whether somebody is of this kind, one of those that go by role."""
        return bool(self._mask(kind).any())

    def prefill(self, kinds: int) -> Best | None:
        """The best one to compute the prompt, of those that are of all these kinds; None if there is none."""
        return self._told(self._ranking.prefill(self._among(kinds)))

    def decode(self, kinds: int, first: Best | None) -> Best | None:
        """The best one to get the prompt's KV, from `first` if that is known, and to generate."""
        exposed_ms = self._exposed_ms(first)
        best = self._ranking.decode(self._among(kinds), exposed_ms)
        return self._told(best, exposed_ms)

    def whole(self, kinds: int) -> Best | None:
        """The best one to run the request as a whole."""
        return self._told(self._ranking.whole(self._among(kinds)))

    def _told(self, best: Best | None, exposed_ms: Column | float = 0.0) -> Best | None:
        if best is None:
            return None
        number, lacking = best.number, self._ranking.lacking
        return Best(
            number,
            best.cost_ms,
            lacking if isinstance(lacking, float) else float(lacking[number]),
            float(self._ranking.computing_ms[number]),
            float(self._fleet.queued_ms[number]),
            exposed_ms if isinstance(exposed_ms, float) else float(exposed_ms[number]),
        )

    def _exposed_ms(self, first: Best | None) -> Column | float:
        """What is left of the transfer to each worker when `first` has computed the prompt."""
        if self._request.links is None or first is None:
            return 0.0
        token_ms = self._request.links.token_ms(first.number, len(self._fleet))
        left = token_ms * self._ranking.lacking - first.computing_ms
        return max(left, 0.0) if isinstance(left, float) else np.maximum(left, 0.0)

    def _among(self, kinds: int) -> Mask:
        among = None
        while kinds:
            kind = kinds & -kinds
            among = self._mask(kind) if among is None else among & self._mask(kind)
            kinds ^= kind
        assert among is not None
        return among

    def _mask(self, kind: int) -> Mask:
        mask = self._masks.get(kind)
        if mask is None:
            mask = self._masks[kind] = self._found(kind)
        return mask

    def _found(self, kind: int) -> Mask:
        request, fleet = self._request, self._fleet
        holds = fleet.capacity_tokens >= request.total_tokens
        match kind:
            case Is.PREFILL_POOL:
                return self._left(fleet.prefill)
            case Is.PREFILLS:
                return self._mask(Is.PREFILL_POOL) & (fleet.capacity_tokens > request.prompt_tokens)
            case Is.DECODE_POOL:
                return self._left(fleet.decode)
            case Is.DECODES:
                return self._mask(Is.DECODE_POOL) & holds
            case Is.DECODES_SAMPLES:
                return self._mask(Is.DECODES) & (self._ticket_tokens <= fleet.capacity_tokens)
            case Is.AGGREGATED:
                return self._left(fleet.aggregated) & holds
            case Is.WHOLE:
                if fleet.decoders:
                    return self._mask(Is.DECODES) | self._mask(Is.AGGREGATED)
                return self._mask(Is.PREFILL_POOL) & holds
            case Is.WHOLE_CALMLY:
                calm = (fleet.requests == 0) | (self._ranking.mixed_step_ms() <= (request.itl_ms or np.inf))
                return np.asarray(self._mask(Is.WHOLE) & calm)
            case Is.CAN_PREFILL:
                return np.asarray(fleet.prompt_limit >= self._ranking.lacking)
            case Is.RUNS_WHOLE_NOW:
                room = fleet.room_if_given_way if request.interactive else fleet.room_tokens
                return self._mask(Is.CAN_PREFILL) & (room >= request.prompt_tokens + 1)
            case Is.TAKES_TICKET:
                return np.asarray(fleet.room_tokens >= self._ticket_tokens)
            case Is.TAKES_TICKET_IF_GIVEN_WAY:
                return np.asarray(fleet.room_if_given_way >= self._ticket_tokens)
        raise AssertionError(kind)

    def _left(self, pool: Mask) -> Mask:
        return pool if self._excluded is None else pool & ~self._excluded

    @property
    def _ticket_tokens(self) -> Column | int:
        """What a ticket takes: the prompt and a first new token, and a block more for each other sample."""
        tokens, others = self._request.prompt_tokens + 1, self._request.samples - 1
        return tokens + others * self._fleet.block_size if others else tokens
