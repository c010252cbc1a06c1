"""What a router has given to one worker and not taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcore.types import PriorityClass, RequestKey
from router.snapshot import InFlight


@dataclass(slots=True)
class Assignment:
    """One request on one worker. `report`: the worker's report count when it was assigned."""

    prefill_tokens: int
    blocks: int
    report: int
    priority: PriorityClass


@dataclass(slots=True)
class WorkerBook:
    """What this router has given to one worker; see `InFlight`.

    Attributes:
        assignments: what is there. prefilling: those with prompt tokens to compute.
    """

    assignments: dict[RequestKey, Assignment] = field(default_factory=dict)
    prefilling: dict[RequestKey, Assignment] = field(default_factory=dict)
    by_class: list[int] = field(default_factory=lambda: [0] * len(PriorityClass))
    prefill_tokens: int = 0
    longest_prefill: int = 0
    new_requests: int = 0
    new_prefill_tokens: int = 0
    new_blocks: int = 0
    report: int = 0
    decisions: int = 0
    draining: bool = False

    def assign(self, key: RequestKey, prefill_tokens: int, blocks: int, priority: PriorityClass) -> None:
        assignment = self.assignments[key] = Assignment(prefill_tokens, blocks, self.report, priority)
        if prefill_tokens:
            self.prefilling[key] = assignment
            self.longest_prefill = max(self.longest_prefill, prefill_tokens)
        self.by_class[priority] += 1
        self.prefill_tokens += prefill_tokens
        self.new_requests += 1
        self.new_prefill_tokens += prefill_tokens
        self.new_blocks += blocks
        self.decisions += 1

    def prefill_computed(self, key: RequestKey) -> None:
        assignment = self.prefilling.pop(key, None)
        if assignment is None:
            return
        self.prefill_tokens -= assignment.prefill_tokens
        if assignment.report == self.report:
            self.new_prefill_tokens -= assignment.prefill_tokens
        if assignment.prefill_tokens == self.longest_prefill:
            self.longest_prefill = max((held.prefill_tokens for held in self.prefilling.values()), default=0)
        assignment.prefill_tokens = 0

    def release(self, key: RequestKey) -> None:
        self.prefill_computed(key)
        assignment = self.assignments.pop(key, None)
        if assignment is None:
            return
        self.by_class[assignment.priority] -= 1
        if assignment.report == self.report:
            self.new_requests -= 1
            self.new_blocks -= assignment.blocks

    def reported(self) -> None:
        self.report += 1
        self.new_requests = self.new_prefill_tokens = self.new_blocks = 0

    def in_flight(self) -> InFlight:
        return InFlight(
            requests=len(self.assignments),
            prefill_tokens=self.prefill_tokens,
            longest_prefill=self.longest_prefill,
            new_requests=self.new_requests,
            new_prefill_tokens=self.new_prefill_tokens,
            new_blocks=self.new_blocks,
            by_class=tuple(self.by_class),
        )
