"""What the last steps did, and why: records for people, and the measurements that step times are learned from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from engine.scheduler import ScheduleDecision
from pdcore.step_time import StepShape, StepTime, StepTimeModel
from pdcore.types import PriorityClass

STEPS_KEPT = 512
"""Records in the ring."""
STEP_TIMES = 32
"""Steps over which `StepLog.mean_ms` is the mean."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        step: its id. started: seconds on the worker's clock.
        tokens: computed in all. decodes: sequences that got one token. prefills: sequences that got more.
        attended: sum of tokens * context, see `pdcore.step_time`.
        bound_by: what kept the step from being larger, see `ScheduleDecision`.
        free_blocks: before its sequences take what they need beside what was cached. preempted: sequences that lost
            their blocks since the last record. swapped_out: those of them whose KV goes to host memory. swapped_in:
            sequences that come back from there.
        running: sequences with blocks. waiting: without, by class (interactive, standard, batch).
        predicted_ms: what the step was expected to take; 0 while too few were seen. ms: what it took.
    """

    step: int
    started: float
    tokens: int
    decodes: int
    prefills: int
    attended: int
    bound_by: str
    free_blocks: int
    preempted: int
    swapped_out: int
    swapped_in: int
    running: int
    waiting: tuple[int, int, int]
    predicted_ms: float
    ms: float = 0.0


class StepLog:
    """The ring of records, and the model of step times fed from it. Not thread-safe: the engine's lock is there."""

    def __init__(self) -> None:
        self._model = StepTimeModel()
        self._records: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._moved = (0, 0, 0)  # preempted, swapped out, swapped in since the last record

    @property
    def step_time(self) -> StepTime:
        """What steps take, as far as is known now."""
        return self._model.fitted

    @property
    def mean_ms(self) -> float:
        """Mean time of the late steps; 0 before the first."""
        late = [record.ms for record in list(self._records)[-STEP_TIMES:]]
        return sum(late) / len(late) if late else 0.0

    def decided(self, decision: ScheduleDecision) -> None:
        """A decision is carried out, be it with a step or without: whoever it moves is in the next record."""
        preempted, out, back = self._moved
        swapped = len(decision.swap_out)
        preempted += len(decision.preempt) + swapped
        self._moved = preempted, out + swapped, back + len(decision.swap_in)

    def begin(
        self,
        step: int,
        started: float,
        decision: ScheduleDecision,
        *,
        free_blocks: int,
        running: int,
        waiting: tuple[int, int, int],
    ) -> StepRecord:
        """The record of a step that is about to run, by a decision that `decided` knows."""
        (preempted, swapped_out, swapped_in), self._moved = self._moved, (0, 0, 0)
        shape = step_shape(decision)
        decodes = sum(chunk.num_tokens == 1 for chunk in decision.chunks)
        return StepRecord(
            step=step,
            started=started,
            tokens=shape.tokens,
            decodes=decodes,
            prefills=len(decision.chunks) - decodes,
            attended=shape.attended,
            bound_by=decision.bound_by,
            free_blocks=free_blocks,
            preempted=preempted,
            swapped_out=swapped_out,
            swapped_in=swapped_in,
            running=running,
            waiting=waiting,
            predicted_ms=self.step_time.predict_ms(shape) if self.step_time.known else 0.0,
        )

    def end(self, record: StepRecord, ms: float) -> None:
        """The step has run, and took `ms` milliseconds."""
        self._records.append(replace(record, ms=ms))
        self._model.observe(StepShape(record.tokens, record.attended), ms)

    def last(self, count: int) -> tuple[StepRecord, ...]:
        """The last `count` records at most, the oldest first."""
        return tuple(self._records)[-count:] if count > 0 else ()


def step_shape(decision: ScheduleDecision) -> StepShape:
    """What a decision's time depends on."""
    return StepShape(
        sum(chunk.num_tokens for chunk in decision.chunks),
        sum(chunk.num_tokens * (chunk.start + chunk.num_tokens) for chunk in decision.chunks),
    )


def by_class(classes: list[PriorityClass]) -> tuple[int, int, int]:
    """How many of each: (interactive, standard, batch)."""
    return (
        classes.count(PriorityClass.INTERACTIVE),
        classes.count(PriorityClass.STANDARD),
        classes.count(PriorityClass.BATCH),
    )
