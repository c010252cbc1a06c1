"""Batch requests fill the gaps: on which workers one more would break the pace of others. Pure.

A worker generates one token of each of its requests a step, so its next step's length is what its clients see between
two tokens. One batch request more is held back where that length, by the worker's step-time model, would exceed the
shortest `itl_ms` of the classes that this router has requests of there. Where there are none, batch takes all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pdcore.classes import ClassObjectives
from pdcore.step_time import StepShape
from pdcore.types import PriorityClass
from router.snapshot import WorkerSnapshot, generating


def closed_to_batch(
    workers: Iterable[WorkerSnapshot], prompt_tokens: int, classes: ClassObjectives
) -> frozenset[str]:
    """The workers that a batch request is kept from; none of those that only compute prompts."""
    return frozenset(
        worker.worker_id
        for worker in generating(workers)
        if _next_step_ms(worker, prompt_tokens) > _bound_ms(worker, classes)
    )


def _bound_ms(worker: WorkerSnapshot, classes: ClassObjectives) -> float:
    objectives = (classes.of(priority).itl_ms for priority in PriorityClass if worker.mine.by_class[priority])
    return min((itl_ms for itl_ms in objectives if itl_ms), default=math.inf)


def _next_step_ms(worker: WorkerSnapshot, prompt_tokens: int) -> float:
    """A step with one token of each request there and of one more; 0 if nothing is known."""
    model = worker.load.step_time
    if not model.known:
        return 0.0
    context = (worker.load.total_blocks - worker.free_blocks) * worker.block_size + prompt_tokens
    return model.predict_ms(StepShape(worker.requests + 1, context))
