"""A request that has not ended, as the dispatcher keeps it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from dataclasses import dataclass, field

from pdcore.types import RequestSpec
from protos import worker_pb2
from router.admission import QueueEntry
from router.limits import Charge
from router.prefixes import PromptNames
from router.stream import RequestStream
from router.tracker import RequestState, RequestTracker

logger = logging.getLogger("router.requests")


@dataclass(slots=True)
class Counters:
    """Since the start.

    Attributes:
        finished: requests that ended well or were cancelled. failed: that ended with an error. replays: of requests.
        failed_transfers: KV transfers that did not arrive. rebuilds: how many of those requests went on without one.
        decisions: attempts begun, by mode and reason.
    """

    finished: int = 0
    failed: int = 0
    replays: int = 0
    failed_transfers: int = 0
    rebuilds: int = 0
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is waiting or running.

    Attributes:
        entry: its place in the queue, kept while it runs. names: of its prompt's blocks.
        deadline: fires at the client's deadline, `ends_at` on the event loop's clock; None without one.
        refused: workers that had no room, and until when they are not asked again.
        avoid: the worker of the last failure, or the pair of the last failed transfer. refusals: so far.
        unfit: prefill workers that failed or refused; others compute the prompt, or the decode side does.
        turn: when its last replay may start, by the budget of replays; seconds on the clock.
        failed_transfers: so far. rebuild: it goes on without a transfer.
        local_only: disaggregation was found impossible.
        branches: the samples of a trunk. trunk: of a sample; None once it goes on alone.
        group: of a sample. joined: its attempt that is part of its trunk's last one; 0 before there is one.
        charge: what its tenant was charged, of all but samples. expected_token: when it was started (seconds on the
            clock), and after how many milliseconds its first token is expected.
        no_route_since: seconds on the clock since when no worker could ever take it; None if one can.
        reserved: what the last decode worker was asked to make room for, and the same as a message, which the prefill
            worker gets as well.
    """

    tracker: RequestTracker
    stream: RequestStream
    entry: QueueEntry
    names: PromptNames
    deadline: asyncio.Handle | None = None
    ends_at: float = math.inf
    refused: dict[str, float] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    unfit: frozenset[str] = frozenset()
    turn: float = 0.0
    refusals: int = 0
    failed_transfers: int = 0
    rebuild: bool = False
    local_only: bool = False
    charge: Charge | None = None
    expected_token: tuple[float, float] | None = None
    no_route_since: float | None = None
    branches: tuple[ActiveRequest, ...] = ()
    trunk: ActiveRequest | None = None
    group: SampleGroup | None = None
    joined: int = 0
    reserved: tuple[RequestSpec, worker_pb2.WorkerRequest] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the client's deadline."""
        return max(0.0, self.ends_at - asyncio.get_running_loop().time())

    @property
    def waits(self) -> bool:
        """A sample whose trunk has still to be dispatched."""
        return self.trunk is not None and self.tracker.state is RequestState.QUEUED


class SampleGroup:
    """The samples of one request, and the trunk that they begin as."""

    def __init__(self, trunk: ActiveRequest) -> None:
        self.trunk = trunk

    def add(self, sample: ActiveRequest) -> None:
        """One more sample, which waits for the trunk."""
        sample.trunk, sample.group = self.trunk, self
        self.trunk.branches = (*self.trunk.branches, sample)

    @property
    def running(self) -> list[ActiveRequest]:
        """Those that have not ended."""
        return [sample for sample in self.trunk.branches if sample.tracker.state is not RequestState.ENDED]


def log_event(level: int, event: str, active: ActiveRequest, **fields: object) -> None:
    """One line per event, ``event key=value ...``, with the same fields on the record; never prompts or outputs."""
    if not logger.isEnabledFor(level):
        return
    shown = {"request_id": active.tracker.request_id, **{k: v for k, v in fields.items() if v != ""}}
    line = " ".join(f"{key}={json.dumps(value, default=str)}" for key, value in shown.items())
    logger.log(level, "%s %s", event, line, extra=shown)
