"""Which of several workers that could take a request is the best: the routing policies, by name. Pure.

::

    cost             the lowest predicted cost, in milliseconds that the client waits
    least_loaded     the fewest queued prompt tokens, or the fewest requests where tokens are generated
    power_of_two     of two drawn at random, the less loaded one
    prefix_affinity  the longest cached beginning of the prompt, then the less loaded one
    round_robin      each in turn

`cost` predicts by what each worker has measured of its own steps (`pdcore.step_time`)::

    where the prompt is computed    steps for what is queued there
                                    + 1.25 * steps for what its prefix cache lacks (`WORK_PRICE`)
    where it only generates         transfer of what its prefix cache lacks, as far as computing does not hide it
    where tokens are generated      `PRICED_TOKENS` steps as long as they will be with this request among them

and for a worker that runs it as a whole all but the transfer; its computing costs more there, for it takes the time
from the streams that run there, each of them (`STREAM_PRICE`), or will (`HERE_PRICE`). A worker that has measured
nothing yet is taken to be like the mean of those that have. What a report says of queued prompts fades as it ages,
towards the mean of all: a worker that was idle some seconds ago is not a better guess than another. What it says of
requests and memory stands until the next one, or until the silence counts as death.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.fleet import Column, Fleet, Mask

Rows = NDArray[np.intp]
"""Numbers of workers."""

SPREAD = 0x9E3779B97F4A7C15
"""Of a multiplicative hash (Knuth, TAOCP 3, 6.4)."""
_WORD = (1 << 64) - 1
MOST = float(np.finfo(np.float64).max)
"""Costs above this are none."""

USES_PREFIXES = frozenset({"cost", "prefix_affinity"})
"""Policies to which it matters what is cached where."""
PRICED_TOKENS = 64
"""Output tokens by whose inter-token latency a worker is judged: how many there will be, nobody knows."""
WORK_PRICE = 0.25
"""Computing takes a worker from all others that wait: its time counts so much more than waiting. So siblings that
arrive together queue up behind the first one, and their common beginning is not computed on every worker."""
HERE_PRICE = 0.25
"""The same once more where streams live: those to come will find the worker busy."""
STREAM_PRICE = 1.0
"""What computing costs each stream that runs there, in its own time: all of it."""
ALIKE = 0.1
"""Costs that exceed the lowest by less than this share are alike: predictions are no better, and turns spread what
is cached."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is ranked for.

    Attributes:
        prompt_tokens: to compute, or to have computed elsewhere.
        cached: tokens of the prompt's beginning that workers have, by number; None if nobody has any.
        avoid: workers that are taken only if there is no other.
        draw: a number that differs from request to request; breaks ties, and is what `power_of_two` draws by.
    """

    prompt_tokens: int
    cached: Column | None = None
    avoid: frozenset[str] = frozenset()
    draw: int = 0


class Best(NamedTuple):
    """A choice: the worker's number, and its predicted cost in milliseconds.

    Attributes:
        lacking: tokens of the prompt that it has to compute, or to be sent. computing_ms: what computing them takes
            there. queued_ms: until it has computed what it was given before.
        exposed_ms: how much longer their transfer takes than computing the prompt elsewhere.
    """

    number: int
    cost_ms: float
    lacking: float = 0.0
    computing_ms: float = 0.0
    queued_ms: float = 0.0
    exposed_ms: float = 0.0


class Ranking:
    """Ranks the workers of a fleet, which must be settled, for one request.

    Args:
        policy: one of `pdcore.config.ROUTING_POLICIES`.
    """

    def __init__(self, policy: str, wanted: Wanted, fleet: Fleet) -> None:
        self._policy = policy
        self._wanted = wanted
        self._fleet = fleet
        self._avoid = fleet.mask_of(wanted.avoid) if wanted.avoid else None

    # -- what is predicted, of every worker ----------------------------------------------------------------------

    @cached_property
    def lacking(self) -> Column | float:
        """Prompt tokens that the worker has to compute or to be sent: its last token always. A number if it is the
        same for all."""
        tokens = self._wanted.prompt_tokens
        if self._wanted.cached is None:
            return float(max(1, tokens))
        return np.maximum(tokens - self._wanted.cached, 1.0)

    @cached_property
    def computing_ms(self) -> Column:
        """To compute what is lacking there."""
        lacking = self.lacking
        return self._fleet.computing_ms(lacking, lacking * (self._wanted.prompt_tokens - 0.5 * lacking))

    @cached_property
    def step_ms(self) -> Column:
        """A step that generates one token of each request there, this one among them."""
        fleet = self._fleet
        return fleet.stream_ms + fleet.stream_attended_ms * self._wanted.prompt_tokens

    def mixed_step_ms(self) -> Column:
        """A step that generates one token of each request there and computes as much of the prompt as goes in."""
        fleet, prompt = self._fleet, self._wanted.prompt_tokens
        tokens = np.minimum(self.lacking, fleet.max_num_batched_tokens)
        each = fleet.prompt_token_ms + fleet.prompt_attended_ms * prompt
        return np.asarray(self.step_ms + fleet.prompt_base_ms + tokens * each)

    # -- the choice ----------------------------------------------------------------------------------------------

    def prefill(self, among: Mask) -> Best | None:
        """The worker that is to compute the prompt; None if there is none."""
        fleet = self._fleet
        cost = fleet.queued_ms + (1 + WORK_PRICE) * self.computing_ms
        return self._best(among, cost, (fleet.queued_prefill_tokens, fleet.requests))

    def decode(self, among: Mask, exposed_ms: Column | float = 0.0) -> Best | None:
        """The worker that is to get the prompt's KV and to generate; None if there is none.

        `exposed_ms`: how much longer the transfer to each would take than computing the prompt.
        """
        fleet = self._fleet
        cost = PRICED_TOKENS * self.step_ms + exposed_ms
        return self._best(among, cost, (fleet.requests, -fleet.free_blocks))

    def whole(self, among: Mask) -> Best | None:
        """The worker that is to run the request as a whole; None if there is none."""
        fleet = self._fleet
        price = (1 + WORK_PRICE + HERE_PRICE) + STREAM_PRICE * fleet.requests
        cost = fleet.queued_ms + price * self.computing_ms + PRICED_TOKENS * self.step_ms
        return self._best(among, cost, (fleet.requests, fleet.queued_prefill_tokens, -fleet.free_blocks))

    def _best(self, among: Mask, cost: Column, load: Sequence[Column]) -> Best | None:
        if self._avoid is not None and (others := among & ~self._avoid).any():
            among = others
        if self._policy == "cost":
            costs = np.where(among, cost, np.inf)
            limit = (1 + ALIKE) * float(np.minimum.reduce(costs, initial=np.inf))
            return self._first((costs <= min(limit, MOST)).nonzero()[0], load, cost)
        rows = among.nonzero()[0]
        match self._policy:
            case "prefix_affinity" if self._wanted.cached is not None:
                return self._first(rows, (-self._wanted.cached, *load), cost)
            case "round_robin":
                return self._first(rows, (), cost)
            case "power_of_two" if rows.size > 2:
                rows = rows[random.Random(self._wanted.draw).sample(range(rows.size), 2)]
        return self._first(rows, load, cost)

    def _first(self, rows: Rows, keys: Sequence[Column], cost: Column) -> Best | None:
        """One key after the other, among those that are equal by all before it; the lowest wins."""
        if not rows.size:
            return None
        for key in (*keys, self._fleet.decisions):
            if rows.size == 1:
                break
            values = key[rows]
            rows = rows[values == values.min()]
        number = int(rows[0] if rows.size == 1 else rows[_drawn(self._fleet.draws[rows], self._wanted.draw)])
        return Best(number, float(cost[number]))


def _drawn(draws: Column, draw: int) -> int:
    """Which of these it is; another one for another `draw`."""
    mixed = (draws.astype(np.uint64) ^ np.uint64(draw * SPREAD & _WORD)) * np.uint64(SPREAD)
    return int(np.argmin(mixed))
