"""When a first token is expected, one worker after the other: what `router.shedding` foretells, written down plainly.

What a forecast is made of is explained there and in `router.capacity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdcore.step_time import StepTime
from pdcore.types import Role
from router.shedding import Ahead, Asked, Forecast
from router.snapshot import WorkerSnapshot


def prompt_ms(model: StepTime, budget: int, tokens: float, attended: float) -> float:
    steps = math.ceil(tokens / budget)
    return model.drift * (model.base_ms * steps + model.token_ms * tokens + model.attended_ms * attended)


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker that computes prompts."""

    model: StepTime
    budget: int
    queued: int

    @property
    def busy_ms(self) -> float:
        return prompt_ms(self.model, self.budget, self.queued, 0)

    @property
    def tokens_per_ms(self) -> float:
        return self.budget / max(1e-6, prompt_ms(self.model, self.budget, self.budget, 0))

    def own_ms(self, prompt_tokens: int, lacking: int) -> float:
        attended = lacking * (prompt_tokens - lacking) + lacking * lacking // 2
        return prompt_ms(self.model, self.budget, lacking, attended)


def computing(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    roles = {worker.role for worker in workers}
    if {Role.PREFILL, Role.DECODE} <= roles:
        return [worker for worker in workers if worker.role is not Role.DECODE]
    return [worker for worker in workers if worker.role is Role.AGGREGATED] or list(workers)


def generating(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    return [worker for worker in workers if worker.role is not Role.PREFILL] or list(workers)


def lanes_of(workers: Sequence[WorkerSnapshot]) -> list[Lane]:
    """Nobody if none of them has measured its steps."""
    who = computing(workers)
    known = [worker for worker in who if worker.load.step_time.known]
    if not known:
        return []
    fastest = min(known, key=lambda w: prompt_ms(w.load.step_time, w.max_num_batched_tokens, 1000, 0))
    return [
        Lane(
            worker.load.step_time if worker.load.step_time.known else fastest.load.step_time,
            worker.max_num_batched_tokens,
            worker.queued_prefill_tokens,
        )
        for worker in who
    ]


def free_places(worker: WorkerSnapshot, prompt_tokens: int) -> int:
    """Requests of such a prompt that it could take; an idle worker takes any."""
    fitting = worker.free_blocks // worker.blocks_for(prompt_tokens + 1)
    return max(int(worker.requests == 0), min(worker.max_requests - worker.requests, fitting))


def poured_ms(lanes: Sequence[Lane], tokens: float) -> float:
    """Until a lane is free that is given a prompt behind so many tokens."""
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


def forecast(
    asked: Asked, ahead: Ahead, workers: Sequence[WorkerSnapshot], start_ms: float | None, pace: float
) -> Forecast | None:
    """None if too little is known."""
    lanes = lanes_of(workers)
    if not lanes:
        return None
    wait_ms = poured_ms(lanes, ahead.tokens) * pace
    if start_ms is not None:
        wait_ms = min(wait_ms, min(lane.busy_ms for lane in lanes) * pace + ahead.requests * start_ms)
        free = sum(free_places(worker, asked.prompt_tokens) for worker in generating(workers))
        if ahead.requests >= free:
            wait_ms = max(wait_ms, (ahead.requests + 1 - free) * start_ms)
    return Forecast(wait_ms, min(lane.own_ms(asked.prompt_tokens, asked.lacking) for lane in lanes) * pace)


def on_worker(worker: WorkerSnapshot, prompt_tokens: int, lacking: int) -> float | None:
    """Until a prompt that is given to the worker now is computed there."""
    model = worker.load.step_time
    lane = Lane(model, worker.max_num_batched_tokens, worker.queued_prefill_tokens)
    return lane.busy_ms + lane.own_ms(prompt_tokens, lacking) if model.known else None
