"""What cannot meet its deadline is shed before its prompt is computed: the prediction, and the rule. Pure.

When a request would get its first token::

    wait   until what is ahead of it, on the workers and in the router's queue, has been computed; or, where the
           workers that generate are full, until so many of their requests have ended as are needed
    own    computing what no worker has cached of its prompt, on the fastest worker

both by the workers' own step-time models (`pdcore.step_time`), and both scaled by how the last predictions compared
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdcore.step_time import StepTime
from pdcore.types import Role
from router.snapshot import WorkerSnapshot, generating

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


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker that computes prompts. `busy_ms`: for what it has been given."""

    model: StepTime
    budget: int
    busy_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """In full steps."""
        return self.budget / max(1e-6, prompt_ms(self.model, self.budget, self.budget, 0))


@dataclass(frozen=True, slots=True)
class Places:
    """Room on a worker that generates: requests, and blocks for their KV. An `idle` one takes any request."""

    requests: int
    blocks: int
    block_size: int
    idle: bool = False

    def free(self, prompt_tokens: int) -> int:
        """Requests of such a prompt that it could take."""
        return max(int(self.idle), min(self.requests, self.blocks // -(-(prompt_tokens + 1) // self.block_size)))


@dataclass(frozen=True, slots=True)
class Capacity:
    """How fast the cluster works requests off.

    `start_ms`: between two starts while requests wait; None if that is not known. `pace`: see `Pace`.
    """

    lanes: tuple[Lane, ...]
    places: tuple[Places, ...]
    start_ms: float | None = None
    pace: float = 1.0


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


def prompt_ms(model: StepTime, budget: int, tokens: float, attended: float) -> float:
    """What computing so many prompt tokens takes, in steps of at most `budget` tokens, in milliseconds."""
    steps = math.ceil(tokens / budget)
    return model.drift * (model.base_ms * steps + model.token_ms * tokens + model.attended_ms * attended)


def computing(workers: Iterable[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Workers where prompts are computed: the prefill pool beside a decode pool, and aggregated ones; without these
    whoever there is."""
    workers = list(workers)
    roles = {worker.role for worker in workers}
    if {Role.PREFILL, Role.DECODE} <= roles:
        return [worker for worker in workers if worker.role is not Role.DECODE]
    return [worker for worker in workers if worker.role is Role.AGGREGATED] or workers


def capacity_of(workers: Sequence[WorkerSnapshot], start_ms: float | None, pace: float) -> Capacity | None:
    """The cluster's capacity by its workers' reports; None if too little is known to predict anything.

    A worker that has measured nothing yet is taken for as fast as the fastest of the others.
    """
    lanes = computing(workers)
    known = [worker for worker in lanes if worker.load.step_time.known]
    if not known:
        return None
    fastest = min(known, key=lambda w: prompt_ms(w.load.step_time, w.max_num_batched_tokens, 1000, 0))
    return Capacity(
        lanes=tuple(
            _lane(worker, worker.load.step_time if worker.load.step_time.known else fastest.load.step_time)
            for worker in lanes
        ),
        places=tuple(
            Places(worker.max_requests - worker.requests, worker.free_blocks, worker.block_size, worker.requests == 0)
            for worker in generating(workers)
        ),
        start_ms=start_ms,
        pace=pace,
    )


def on_worker(worker: WorkerSnapshot, prompt_tokens: int, lacking: int) -> float | None:
    """Milliseconds until a prompt that is given to the worker now is computed there; None if that is not known."""
    model = worker.load.step_time
    if not model.known:
        return None
    return _lane(worker, model).busy_ms + _own_ms(_lane(worker, model), prompt_tokens, lacking)


def forecast(asked: Asked, ahead: Ahead, capacity: Capacity) -> Forecast:
    """When it would get its first token. O(workers)."""
    wait_ms = _poured(capacity.lanes, ahead.tokens) * capacity.pace
    if capacity.start_ms is not None:
        # Requests were started as fast as that, whatever is predicted: prompts may be computed elsewhere, too.
        idle_ms = min(lane.busy_ms for lane in capacity.lanes) * capacity.pace
        wait_ms = min(wait_ms, idle_ms + ahead.requests * capacity.start_ms)
    free = sum(places.free(asked.prompt_tokens) for places in capacity.places)
    if capacity.start_ms is not None and ahead.requests >= free:
        wait_ms = max(wait_ms, (ahead.requests + 1 - free) * capacity.start_ms)
    own_ms = min(_own_ms(lane, asked.prompt_tokens, asked.lacking) for lane in capacity.lanes)
    return Forecast(wait_ms, own_ms * capacity.pace)


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


def _lane(worker: WorkerSnapshot, model: StepTime) -> Lane:
    budget = worker.max_num_batched_tokens
    return Lane(model, budget, prompt_ms(model, budget, worker.queued_prefill_tokens, 0))


def _own_ms(lane: Lane, prompt_tokens: int, lacking: int) -> float:
    attended = lacking * (prompt_tokens - lacking) + lacking * lacking // 2
    return prompt_ms(lane.model, lane.budget, lacking, attended)


def _poured(lanes: Sequence[Lane], tokens: float) -> float:
    """Milliseconds until a worker is free that is given a prompt behind so many tokens.

    ::

        busy_ms |     __       the level that `tokens` come up to, if each worker takes
                |~~~~|  |~~~   what it computes until then
                |_   |  |
                | |__|  |___
    """
    by_busy = sorted(lanes, key=lambda lane: lane.busy_ms)
    level, rate = by_busy[0].busy_ms, 0.0
    for lane, following in zip(by_busy, [*by_busy[1:], None], strict=True):
        rate += lane.tokens_per_ms
        room = math.inf if following is None else (following.busy_ms - level) * rate
        if tokens <= room:
            break
        tokens -= room
        assert following is not None
        level = following.busy_ms
    return level + tokens / rate
