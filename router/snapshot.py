"""What a router knows of a worker when it chooses. Pure.

Loads are pushed and thus a little old. What this router has sent since is added, so that a burst between two reports
does not pile up on one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcore.types import Role, WorkerLoad

STALLED_PER_PLACE = 16
"""Requests of clients that take nothing, for each that may run, beside these: they take no part in steps, but they
are remembered everywhere."""


@dataclass(slots=True)  # not frozen: that would take several times as long to make
class InFlight:
    """Work that this router has given to a worker; never changed once it is made.

    Attributes:
        requests: requests on it. prefill_tokens: prompt tokens sent to it, or planned, and not known to be computed.
        longest_prefill: the largest share of one request in that.
        by_class: requests on it of each class (index: `PriorityClass`).
        new_requests, new_prefill_tokens, new_blocks: the part sent after the worker's last report, which that report
            cannot contain.
    """

    requests: int = 0
    prefill_tokens: int = 0
    longest_prefill: int = 0
    new_requests: int = 0
    new_prefill_tokens: int = 0
    new_blocks: int = 0
    by_class: tuple[int, ...] = (0, 0, 0)


@dataclass(slots=True)  # the same
class WorkerSnapshot:
    """A connected worker as the router sees it; never changed once it is made.

    Attributes:
        load: its last report. mine: what this router has on it.
        block_size: tokens per KV block. max_requests: sequences it may hold.
        max_queued_prefill_tokens: prompt tokens that it may hold queued, its longest prompt not counted.
        decisions: requests ever sent to it by this router; breaks ties, so that equals take turns.
        max_num_batched_tokens: tokens that it computes in one step at most. age_s: of `load`, in seconds.
    """

    worker_id: str
    role: Role
    load: WorkerLoad
    block_size: int
    max_requests: int
    max_queued_prefill_tokens: int
    mine: InFlight = field(default_factory=InFlight)
    decisions: int = 0
    max_num_batched_tokens: int = 1 << 20
    age_s: float = 0.0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that its whole KV pool holds."""
        return self.load.total_blocks * self.block_size

    @property
    def requests(self) -> int:
        """Requests on the worker, those it has not heard of yet included; not those of clients that take nothing."""
        load, mine = self.load, self.mine
        reported = load.waiting + load.running + load.paused + load.open_tickets
        # A report can be on its way while a request is sent: what is mine is there in any case.
        requests = max(mine.requests, reported + mine.new_requests)
        if not load.stalled_requests:
            return requests
        return requests - min(load.stalled_requests, STALLED_PER_PLACE * self.max_requests, requests)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that the worker has to compute, those it has not heard of yet included."""
        return max(self.mine.prefill_tokens, self.load.queued_prefill_tokens + self.mine.new_prefill_tokens)

    @property
    def free_blocks(self) -> int:
        """KV blocks to be had, those among them that clients who take nothing would give up."""
        return self.load.free_blocks + self.load.stalled_blocks - self.mine.new_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
