"""Which workers run a request: a pure choice from snapshots of their load.

A request runs in one of two modes::

    disaggregated   prefill worker P computes the prompt and ships its KV to decode worker D
    local           one aggregated (or decode) worker runs both phases

Here is which workers could take it, and in which mode; which of them is the best is `router.ranking`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pdcore.types import Role
from router.ranking import Wanted, best_decode, best_prefill, best_whole
from router.snapshot import WorkerSnapshot


class Mode(StrEnum):
    """How a request runs; the value is what the timeline shows."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the choice depends on.

    Attributes:
        prompt_tokens: tokens to compute before a new one is sampled, delivered ones included.
        total_tokens: prompt and output together, at most; a worker that decodes must be able to hold them.
        samples: that go on from the prompt; a ticket has a block for each of them beside the prompt's.
        resumes: tokens were delivered already; the request is replayed locally from prompt + delivered.
        interactive: batch requests give way to it, also where it needs a ticket.
        rebuild: a KV transfer failed, and the decode side is to compute the prompt itself.
        local_only: disaggregation was found impossible for it.
        exclude: workers that must not be taken. avoid: workers taken only if there is no other.
        policy: how the best of those is found that could take it. cached, draw, transfer_ms: see `Wanted`.
    """

    prompt_tokens: int
    total_tokens: int
    samples: int = 1
    resumes: bool = False
    interactive: bool = False
    rebuild: bool = False
    local_only: bool = False
    exclude: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    policy: str = "cost"
    cached: Mapping[str, int] = field(default_factory=dict)
    draw: int = 0
    transfer_ms: float = 0.0

    @property
    def wanted(self) -> Wanted:
        """As `router.ranking` knows it."""
        return Wanted(self.prompt_tokens, self.cached, self.avoid, self.draw, self.transfer_ms)


@dataclass(frozen=True, slots=True)
class Route:
    """The choice. `prefill` is None in local mode; `reason` says why this mode.

    `rebuild`: the KV was computed before, and its transfer failed.
    """

    mode: Mode
    decode: str
    prefill: str | None
    reason: str
    rebuild: bool = False


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Nothing can start the request now. `busy`: suitable workers exist, but have no room at present."""

    busy: bool
    reason: str


def choose(request: RouteRequest, workers: Sequence[WorkerSnapshot]) -> Route | NoRoute:
    """Choose the best workers that can start `request` now.

    `workers` are those that are connected and take new requests.
    """
    usable = [worker for worker in workers if worker.worker_id not in request.exclude]
    prefill_pool = [w for w in usable if w.role is Role.PREFILL]
    decode_pool = [w for w in usable if w.role is Role.DECODE]
    # A worker whose whole cache is too small would refuse the request for good.
    prefill = [w for w in prefill_pool if request.prompt_tokens < w.capacity_tokens]
    decode = [w for w in decode_pool if request.total_tokens <= w.capacity_tokens]
    aggregated = [w for w in usable if w.role is Role.AGGREGATED and request.total_tokens <= w.capacity_tokens]

    if request.rebuild:
        return _local(request, aggregated + decode, "rebuild")
    # Tokens are delivered: their KV is gone, and the worker that goes on computes prompt and tokens again itself.
    if request.resumes:
        return _local(request, aggregated + decode, "replay")
    if request.local_only:
        return _local(request, aggregated + decode, "kv_reservation_too_large")
    if prefill and decode:
        first = best_prefill(request.policy, request.wanted, [w for w in prefill if _can_prefill(request, w)])
        # Samples of a request that runs as a whole wait for blocks one by one; a ticket has them all or none.
        takers = [w for w in decode if _ticket_blocks(request, w) <= w.load.total_blocks]
        if not takers:
            return _local(request, aggregated + decode, "kv_reservation_too_large")
        second = best_decode(request.policy, request.wanted, _takers(request, takers))
        if first is not None and second is not None:
            return Route(Mode.DISAGGREGATED, second.worker_id, first.worker_id, "prefill_pool_serves")
        # Both pools serve but one is full: an aggregated worker, if there is one, takes what they cannot.
        if aggregated:
            return _local(request, aggregated, "pools_full")
        return NoRoute(busy=True, reason="prefill pool full" if first is None else "decode pool full")
    if prefill_pool and not prefill:
        return _local(request, aggregated or decode, "prompt_too_large_for_prefill_pool")
    if not aggregated:
        return _local(request, decode, "prefill_pool_empty")
    if not prefill:
        return _local(request, aggregated, "aggregated_pool")
    return _local(request, aggregated, "request_too_large_for_decode_pool" if decode_pool else "decode_pool_empty")


def _local(request: RouteRequest, workers: Sequence[WorkerSnapshot], reason: str) -> Route | NoRoute:
    if not workers:
        return NoRoute(busy=False, reason="no decode or aggregated worker that holds the whole request")
    ready = [
        w
        for w in workers
        if _can_prefill(request, w)
        and _has_room(w, w.blocks_for(request.prompt_tokens + 1), gives_way=request.interactive)
    ]
    if not ready:
        return NoRoute(busy=True, reason="no room on the workers that run both phases")
    best = best_whole(request.policy, request.wanted, ready)
    assert best is not None, "some are ready"
    return Route(Mode.LOCAL, best.worker_id, None, reason, rebuild=request.rebuild)


def _takers(request: RouteRequest, workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Decode workers that could take its KV. Batch requests give way to an interactive one, but where there is room
    nobody has to."""
    room = [w for w in workers if _has_room(w, _ticket_blocks(request, w))]
    return room if room or not request.interactive else [w for w in workers if _makes_room(request, w)]


def _makes_room(request: RouteRequest, worker: WorkerSnapshot) -> bool:
    return _has_room(worker, _ticket_blocks(request, worker), gives_way=True)


def _can_prefill(request: RouteRequest, worker: WorkerSnapshot) -> bool:
    """All prompts on a worker but the longest stay within the limit.

    So an idle worker takes a prompt of any length, a second long one waits here, and short ones need not wait behind
    a long one: the worker's scheduler lets them pass.
    """
    queued, tokens = worker.queued_prefill_tokens, request.wanted.lacking(worker.worker_id)
    longest = max(tokens, min(worker.mine.longest_prefill, queued))
    return queued + tokens - longest <= worker.max_queued_prefill_tokens


def _ticket_blocks(request: RouteRequest, worker: WorkerSnapshot) -> int:
    """What a ticket for the request takes: the prompt, and a block for the first token of each sample."""
    return worker.blocks_for(request.prompt_tokens + 1) + request.samples - 1


def _has_room(worker: WorkerSnapshot, blocks: int, gives_way: bool = False) -> bool:
    """Room for so many blocks. An idle worker is asked in any case: it knows best whether it fits.

    `gives_way`: what batch requests there would give up for it counts as free.
    """
    requests, free_blocks = worker.requests, worker.free_blocks
    if gives_way:
        requests -= worker.load.yielding_requests
        free_blocks += worker.load.yielding_blocks
    if requests >= worker.max_requests:
        return False
    return worker.requests == 0 or free_blocks >= blocks
