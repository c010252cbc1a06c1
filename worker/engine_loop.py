"""The thread that steps an engine: schedule, run, apply, tell."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from engine.engine import Engine, StepPlan, StepResult
from pdcore.errors import InternalError
from pdcore.tracebacks import wordless

logger = logging.getLogger(__name__)

_FAILED_STEPS_AT_MOST = 3
"""So many steps in a row that raise are a broken worker, not a bad request."""


class EngineLoop:
    """Steps `engine` while it has work and sleeps while it has none.

    Args:
        threads: intra-op threads of torch; 0 leaves torch's default.
        cpu_affinity: cores of the loop's thread (and of the threads that torch starts from it); empty leaves
            them free.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        threads: int = 0,
        cpu_affinity: Sequence[int] = (),
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._cpu_affinity = tuple(cpu_affinity)
        self._condition = threading.Condition()
        self._awake = False
        self._stopping = False
        self._failed_in_a_row = 0
        self.looks = 0  # for work: grows while the loop lives, with or without any
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(
        self,
        on_plan: Callable[[StepPlan], None],
        on_result: Callable[[StepPlan, StepResult], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Start stepping.

        Args:
            on_plan: called before a step runs, with its plan. on_result: called after it, with plan and result.
            on_crash: called once if a step raises; the loop has ended then and nothing more will be computed.

        All callbacks run on the loop's thread and must not block: what they cost is added to every step.
        """
        self._on_plan, self._on_result, self._on_crash = on_plan, on_result, on_crash
        self._thread.start()

    def wake(self) -> None:
        """Something changed that may make a step possible. Callable from any thread, never blocks for long."""
        with self._condition:
            self._awake = True
            self._condition.notify()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End the loop after the running step; True if the thread has ended within `timeout_s`.

        The thread must be joined before the interpreter exits: a thread inside torch then can abort the process.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._pin()
            while self._step_or_wait():
                pass
        except BaseException as error:
            logger.exception("the engine loop has failed", exc_info=wordless(error))
            self._on_crash(error)

    def _pin(self) -> None:
        if self._cpu_affinity:
            os.sched_setaffinity(0, self._cpu_affinity)
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)  # per thread with some builds of torch: set where it is used

    def _step_or_wait(self) -> bool:
        with self._condition:
            if self._stopping:
                return False
            self._awake = False
        self.looks += 1
        plan = self._engine.schedule()
        if plan is None:
            self._sleep()
            return True
        self._on_plan(plan)
        self._on_result(plan, self._run_step(plan))
        return True

    def _run_step(self, plan: StepPlan) -> StepResult:
        """A step that raises ends its own requests, not the worker, unless steps keep raising."""
        try:
            output = self._engine.execute(plan)
        except Exception as error:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _FAILED_STEPS_AT_MOST:
                raise
            logger.exception("step %d has failed", plan.step_id, exc_info=wordless(error))
            return self._engine.fail(plan, InternalError("the forward pass failed"))
        self._failed_in_a_row = 0
        return self._engine.apply(plan, output)

    def _sleep(self) -> None:
        with self._condition:
            if self._awake or self._stopping:
                return
            # Whoever makes work possible wakes the loop; the bound only guards against a lost wake-up.
            self._condition.wait(timeout=0.1)
