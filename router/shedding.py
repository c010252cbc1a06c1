"""What cannot meet its deadline is shed before its prompt is computed: the prediction, and the rule. Pure.

When a request would get its first token::

    wait   until what is ahead of it, on the workers and in the router's queue, has been computed; or, where the
           workers that generate are full, until so many of their requests have ended as are needed
    own    computing what no worker has cached of its prompt, on the fastest worker

both by the workers' own step-time models (`router.capacity`), and both scaled by how the last predictions compared
to what came of them (`Pace`). What is ahead in the queue is poured over the workers as they become free, by tokens;
or it is started at the pace at which the last requests were, if that is sooner.

It is shed ::

    its client's deadline     wait + own exceed what is left of it by `CERTAIN`
    its class's objective     time waited + wait + own exceed `ARRIVING` of the objective when it comes, or
                              `WAITING` of it later on. The objective is never taken for less than twice `own`: a
                              prompt that takes long by itself may wait for about as long.

Predictions are wrong at times, so there are two limits to what they may do. A request that need not wait is never
shed, whatever its objective; only if its client's deadline is `HOPELESS` times too short. And who knows nothing (no
worker has measured its steps yet) sheds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from router.capacity import Capacity, attended_by, prompt_ms
from router.fleet import Fleet

ARRIVING = 0.8
"""Share of its class's objective within which a request has to be expected when it comes."""
WAITING = 0.95
"""Share of it at which one that waits is given up: of those expected at the last moment half come too late."""
CERTAIN = 1.25
HOPELESS = 3.0
PACE_FADE = 0.9
"""Weight of the older predictions beside the newest one."""
MAX_PACE = 4.0
"""Predictions are scaled by no more than this, either way."""
PACE_PRIOR_MS = 50.0
"""Differences below this say nothing about the pace."""


class Ahead(NamedTuple):
    """Who is served before a request in the router's queue. `tokens`: of their prompts that no worker had cached."""

    tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has not been started.

    Attributes:
        prompt_tokens: its prompt. lacking: those of them that no worker has cached.
        objective_ms: of its class, to the first token; 0 is none.
        deadline_ms: until its client's deadline; infinite without one.
        waited_ms: so far; None if it has just come.
    """

    prompt_tokens: int
    lacking: int
    objective_ms: float = 0.0
    deadline_ms: float = math.inf
    waited_ms: float | None = None


class Forecast(NamedTuple):
    """When a request would get its first token, in milliseconds from now: `wait_ms` + `own_ms`."""

    wait_ms: float
    own_ms: float


class Overdue(NamedTuple):
    """A request is to be shed. `cause`: ``deadline`` or ``objective``, which allows `allowed_ms`. `retry_after_s`:
    when so much of the backlog should be gone that one like it would be let in."""

    cause: str
    expected_ms: float
    allowed_ms: float
    retry_after_s: float


def on_worker(fleet: Fleet, number: int, prompt_tokens: int, lacking: int) -> float | None:
    """Milliseconds until a prompt that is given to the worker now is computed there; None if that is not known."""
    model = fleet.own_model(number)
    if model is None:
        return None
    budget, queued = fleet.max_num_batched_tokens.item(number), fleet.queued_prefill_tokens.item(number)
    own_ms = prompt_ms(model, budget, lacking, attended_by(prompt_tokens, lacking))
    return prompt_ms(model, budget, queued, 0) + own_ms


def forecast(asked: Asked, ahead: Ahead, capacity: Capacity) -> Forecast:
    """When it would get its first token."""
    wait_ms, start_ms = capacity.poured_ms(ahead.tokens) * capacity.pace, capacity.start_ms
    if start_ms is not None:
        # Requests were started as fast as that, whatever is predicted: prompts may be computed elsewhere, too.
        wait_ms = min(wait_ms, capacity.idle_ms * capacity.pace + ahead.requests * start_ms)
        lacking = ahead.requests + 1 - capacity.free_places(asked.prompt_tokens)
        if lacking > 0:
            wait_ms = max(wait_ms, lacking * start_ms)
    return Forecast(wait_ms, capacity.own_ms(asked.prompt_tokens, asked.lacking) * capacity.pace)


def verdict(asked: Asked, expected: Forecast) -> Overdue | None:
    """Whether to shed a request; None to keep it."""
    wait_ms, own_ms = expected
    ttft_ms = wait_ms + own_ms
    certain = CERTAIN if wait_ms > 0 else HOPELESS
    if ttft_ms > certain * asked.deadline_ms:
        return Overdue("deadline", ttft_ms, asked.deadline_ms, (ttft_ms - asked.deadline_ms) / 1000)
    if not asked.objective_ms or wait_ms <= 0:
        return None
    waited_ms, share = (0.0, ARRIVING) if asked.waited_ms is None else (asked.waited_ms, WAITING)
    objective_ms = max(asked.objective_ms, 2 * own_ms)
    if waited_ms + ttft_ms > share * objective_ms:
        retry_after_s = max(0.0, ttft_ms - ARRIVING * objective_ms) / 1000
        return Overdue("objective", waited_ms + ttft_ms, share * objective_ms, retry_after_s)
    return None


class Pace:
    """How long first tokens took compared to what was predicted when their requests were started.

    Old ones fade. Step times leave out what else a step does, so prompts beside running decodes are slower.
    """

    def __init__(self) -> None:
        self._expected = self._real = 0.0

    @property
    def factor(self) -> float:
        """To scale predictions by."""
        factor = (self._real + PACE_PRIOR_MS) / (self._expected + PACE_PRIOR_MS)
        return min(max(factor, 1 / MAX_PACE), MAX_PACE)

    def observe(self, expected_ms: float, real_ms: float) -> None:
        """A first token that was expected after `expected_ms`, by step times alone, came after `real_ms`."""
        self._expected = PACE_FADE * self._expected + expected_ms
        self._real = PACE_FADE * self._real + min(real_ms, MAX_PACE * expected_ms + PACE_PRIOR_MS)
