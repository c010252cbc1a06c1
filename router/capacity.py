"""How fast the workers compute prompts and take requests, for the prediction of first tokens. Pure.

Lanes are the workers that compute prompts (`Fleet.computing`). Tokens that wait in the router are poured over them::

    busy_ms |     __       the level that the tokens come up to, if each lane takes
            |~~~~|  |~~~   what it computes until then, in full steps
            |_   |  |
            | |__|  |___

A capacity is what the workers had reported when it was made; what they report later changes nothing of it. It comes
in two forms with the same results: a thousand workers are columns, and a handful is gone through one by one, for
which numpy takes twice as long.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from router.fleet import Column, Fleet, Mask, Step

FEW = 16
"""Workers that are faster gone through one by one."""
TYPICAL_TOKENS = 1000
"""The prompt by which lanes are compared where nothing else is known of a request."""
SHORTEST_STEP_MS = 1e-6

Numbers = NDArray[np.intp]


class Capacity(ABC):
    """How fast the cluster works requests off.

    Attributes:
        start_ms: between two starts while requests wait; None if that is not known. pace: see `router.shedding.Pace`.
        idle_ms: until a lane has computed what it has been given.
    """

    start_ms: float | None
    pace: float
    idle_ms: float

    @abstractmethod
    def poured_ms(self, tokens: float) -> float:
        """Milliseconds until a lane is free that is given a prompt behind so many tokens (>= 0)."""

    @abstractmethod
    def own_ms(self, prompt_tokens: int, lacking: int) -> float:
        """What computing `lacking` tokens of a prompt takes, on the lane that is the fastest at it."""

    @abstractmethod
    def free_places(self, prompt_tokens: int) -> float:
        """Requests of such a prompt that the workers that generate could take now. An idle one takes any request, so
        it counts as one place at least. To be asked only if `start_ms` is known: it is of no use else."""


def capacity_of(fleet: Fleet, start_ms: float | None, pace: float, *, few: int = FEW) -> Capacity | None:
    """The cluster's capacity by its workers' reports; None if too little is known to predict anything.

    A worker that has measured nothing yet is taken for as fast as the fastest of the others.

    Args:
        few: workers at most that are gone through one by one.
    """
    lanes = fleet.computing.nonzero()[0]
    if len(fleet.number_of) <= few:
        models = [fleet.own_model(number) for number in lanes.tolist()]
        return FewWorkers(fleet, lanes, models, start_ms, pace) if any(models) else None
    known = fleet.known[lanes]
    return ManyWorkers(fleet, lanes, known, start_ms, pace) if np.count_nonzero(known) else None


def prompt_ms(model: Step, budget: float, tokens: float, attended: float) -> float:
    """What computing so many prompt tokens takes, in steps of at most `budget` tokens, in milliseconds."""
    base_ms, token_ms, attended_ms = model
    return base_ms * math.ceil(tokens / budget) + token_ms * tokens + attended_ms * attended


def attended_by(prompt_tokens: int, lacking: int) -> int:
    """To how many tokens those attend, together, that are computed at the end of a prompt."""
    return lacking * (prompt_tokens - lacking) + lacking * lacking // 2


class FewWorkers(Capacity):
    """One by one, in plain floats.

    Args:
        lanes: their numbers. models: their step-time models; None of those that have measured too little.
    """

    def __init__(
        self, fleet: Fleet, lanes: Numbers, models: list[Step | None], start_ms: float | None, pace: float
    ) -> None:
        self.start_ms = start_ms
        self.pace = pace
        budgets, queues = fleet.max_num_batched_tokens[lanes].tolist(), fleet.queued_prefill_tokens[lanes].tolist()
        fastest = None
        if None in models:
            known = [(model, budget) for model, budget in zip(models, budgets, strict=True) if model]
            fastest, _ = min(known, key=lambda lane: prompt_ms(lane[0], lane[1], TYPICAL_TOKENS, 0))
        # Of each lane busy_ms, its model and its budget; the least busy first.
        self._lanes = sorted(
            (prompt_ms(model, budget, queued, 0), model, budget)
            for own, budget, queued in zip(models, budgets, queues, strict=True)
            if (model := own or fastest)
        )
        self.idle_ms = self._lanes[0][0]
        if start_ms is not None:
            rooms = fleet.generating.nonzero()[0]
            columns = fleet.places, fleet.free_blocks, fleet.block_size, fleet.requests
            self._rooms = [*zip(*[column[rooms].tolist() for column in columns], strict=True)]

    def poured_ms(self, tokens: float) -> float:
        level = rate = 0.0
        for busy_ms, (base_ms, token_ms, _), budget in self._lanes:
            room = (busy_ms - level) * rate
            if tokens < room:
                break
            tokens -= room
            level = busy_ms
            rate += budget / max(SHORTEST_STEP_MS, base_ms + token_ms * budget)
        return level + tokens / rate

    def own_ms(self, prompt_tokens: int, lacking: int) -> float:
        attended = attended_by(prompt_tokens, lacking)
        return min([prompt_ms(model, budget, lacking, attended) for _, model, budget in self._lanes])

    def free_places(self, prompt_tokens: int) -> float:
        tokens, free = prompt_tokens + 1, 0.0
        for places, blocks, block_size, requests in self._rooms:
            free += max(requests == 0, min(places, blocks // -(-tokens // block_size)))
        return free


class ManyWorkers(Capacity):
    """Columns, of lanes and of the workers that generate.

    Args:
        lanes: their numbers. known: a mask of those that have measured their steps.
    """

    def __init__(self, fleet: Fleet, lanes: Numbers, known: Mask, start_ms: float | None, pace: float) -> None:
        self.start_ms = start_ms
        self.pace = pace
        self._budgets = budgets = fleet.max_num_batched_tokens[lanes]
        self._models = models = fleet.own_models.take(lanes, axis=1)
        if np.count_nonzero(known) < len(lanes):
            typical_ms = _prompts_ms(models, budgets, TYPICAL_TOKENS)
            models[:, ~known] = models[:, [np.where(known, typical_ms, np.inf).argmin()]]
        self._busy_ms = _prompts_ms(models, budgets, fleet.queued_prefill_tokens[lanes])
        self.idle_ms = _least(self._busy_ms)
        self._levels: _Levels | None = None
        if start_ms is not None:
            rooms = fleet.generating.nonzero()[0]
            self._places, self._blocks = fleet.places[rooms], fleet.free_blocks[rooms]
            self._block_sizes, self._idle = fleet.block_size[rooms], fleet.requests[rooms] == 0

    def poured_ms(self, tokens: float) -> float:
        if not tokens:
            return self.idle_ms  # nobody waits, most of the time
        if self._levels is None:
            self._levels = _Levels(self._models, self._budgets, self._busy_ms)
        return self._levels.after(tokens)

    def own_ms(self, prompt_tokens: int, lacking: int) -> float:
        return _least(_prompts_ms(self._models, self._budgets, lacking, attended_by(prompt_tokens, lacking)))

    def free_places(self, prompt_tokens: int) -> float:
        blocks = np.ceil((prompt_tokens + 1) / self._block_sizes)
        free = np.minimum(self._places, np.floor(self._blocks / blocks))
        return float(np.maximum(free, self._idle).sum())


class _Levels:
    """Lane after lane, the least busy first.

    Attributes:
        starts: the level from which it takes its share, in ms. rates: tokens that it and those before it compute in a
            ms. poured: tokens that it takes until the level is there.
    """

    def __init__(self, models: Column, budgets: Column, busy_ms: Column) -> None:
        order = busy_ms.argsort()
        rates = budgets / np.maximum(SHORTEST_STEP_MS, models[0] + models[1] * budgets)
        self._starts = busy_ms[order]
        self._rates = rates[order].cumsum()
        self._poured = np.zeros(len(order))
        ((self._starts[1:] - self._starts[:-1]) * self._rates[:-1]).cumsum(out=self._poured[1:])

    def after(self, tokens: float) -> float:
        """The level that so many tokens come up to."""
        last = int(self._poured.searchsorted(tokens, "right")) - 1
        start, poured, rate = (column.item(last) for column in (self._starts, self._poured, self._rates))
        return float(start + (tokens - poured) / rate)


def _prompts_ms(models: Column, budgets: Column, tokens: Column | float, attended: float = 0.0) -> Column:
    """The same as `prompt_ms` of each of these workers; `models` of shape [3, workers]."""
    took = np.asarray(models[0] * np.ceil(tokens / budgets) + models[1] * tokens)
    return took + models[2] * attended if attended else took


def _least(column: Column) -> float:
    return float(column.item(column.argmin()))  # a quarter of what `min` takes
