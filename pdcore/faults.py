"""Named fault points: places in the protocol where a test can kill, stall or stop a process.

A fault plan is part of a worker's configuration and empty in production; `hit` then costs one dictionary
look-up. `once_file` makes a plan fire once over all restarts of the process: the process that creates
the file (exclusively) is the one that fails.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Every point, in the order in which a request meets them. A plan that names another is refused.
FAULT_POINTS: tuple[str, ...] = (
    "decode.before_reserve",  # D has the reserve command, no block is taken yet
    "decode.after_reserve",  # D's blocks are owned by the ticket, R has not been told
    "prefill.before_start",  # P has the prefill command, nothing is allocated
    "prefill.before_first_chunk",  # P has allocated its blocks, no step has run
    "prefill.after_chunk",  # a chunk has been computed; its frames may be on their way
    "prefill.before_frame",  # P is about to gather and send a frame
    "decode.frame_received",  # D has a whole frame, nothing is scattered
    "decode.frame_scattered",  # D has scattered a frame, the acknowledgement is not sent
    "prefill.before_manifest",  # every frame is sent, the manifest is not
    "prefill.after_manifest",  # the manifest is on its way
    "decode.before_commit",  # D has the manifest and all frames
    "decode.after_commit",  # the ticket is a sequence; it has not run
    "decode.after_step",  # a step has run, its tokens are not reported
    "decode.after_report",  # tokens are with the session's outbox
)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What to do at one fault point.

    Attributes:
        point: one of `FAULT_POINTS`.
        action: ``kill`` sends SIGKILL to this process; ``stop`` sends SIGSTOP, and it stands still until somebody
            sends SIGCONT; ``stall`` sleeps for `seconds`.
        skip: how many visits to let pass first.
        seconds: length of a stall, in seconds.
        once_file: fire only if this file can be created; fire on every visit past `skip` if None.
    """

    point: str
    action: Literal["kill", "stop", "stall"] = "kill"
    skip: int = 0
    seconds: float = 0.0
    once_file: str | None = None


class FaultPoints:
    """The fault points of one process. Thread-safe enough for its purpose: a visit count may be off by one."""

    def __init__(self, plans: Iterable[FaultPlan] = ()) -> None:
        self._plans = {plan.point: plan for plan in plans}
        self._visits: dict[str, int] = {}

    def hit(self, point: str) -> None:
        """Mark that `point` is reached; kills, stops or stalls the process if a plan says so."""
        plan = self._plans.get(point)
        if plan is None:
            return
        visits = self._visits.get(point, 0)
        self._visits[point] = visits + 1
        if visits < plan.skip or not self._claim(plan.once_file):
            return
        if plan.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.2)  # another thread may take the signal: this one must not go on before all have stopped
        time.sleep(plan.seconds)

    @staticmethod
    def _claim(once_file: str | None) -> bool:
        if once_file is None:
            return True
        try:
            Path(once_file).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
