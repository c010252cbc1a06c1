"""What runs in the next step: pure functions from a snapshot to a decision. Nothing here touches an engine.

One scheduler serves every role. A sequence has computed tokens chasing known tokens; a decode, a chunk of a prompt
and a chunk of a preempted sequence's tokens differ only in how many are missing. The rules:

1. *Turns.* Of the sequences that hold blocks and have credit, `max_num_seqs` take part. If there are more (resumed
   and committed ones come unasked), those go first that have waited longest since their last step; under the policy
   `priority` batch ones beyond their share go behind all others.
2. *Decodes first.* Every one of them that lacks a single token gets it. `max_num_seqs` is at most the token budget,
   so decodes always fit and prefills take only what they leave.
3. *Memory for growth* goes to the oldest first. If a decode lacks a block, sequences of stalled clients are
   preempted. If there are none: while there are tickets, the youngest are revoked and the decode sits out until their
   blocks are back; without tickets, the youngest running sequence that is younger is preempted, and the next, until a
   block comes free (shared ones do not), but none that has made no progress since it was preempted itself. If there
   is none younger, it sits out while others run; if it is the only one that could run, the youngest paused one is
   preempted. Under the policy `priority` an interactive one takes from batch ones first, however old they are, and a
   batch one from its like first, and from interactive ones only if they could not take from it. Who is preempted is
   swapped or dropped; what a swap frees comes when it is copied (`engine.preemption`).
4. *Admission* is in the order of the queue's policy (`pdcore.queueing`), all blocks at once, and leaves a block of
   growth to every running sequence.
   Blocks that the prefix cache has of a sequence are taken from it: they cost memory only if nobody uses them.
   One that does not fit is passed over by younger ones, and by tickets, at most `MAX_PASSED_OVER` times: then
   nothing more is admitted and no ticket granted before it is. Nothing is admitted in a step in which a decode lacks
   memory. One whose KV is in host memory is admitted alike, and runs when it is copied in. For the first one that
   does not fit, and for a ticket that was refused, sequences of stalled clients are preempted.
   Before anything else running batch requests give way to interactive ones that wait, or whose ticket was refused,
   if the policy is `priority` (`engine.displacement`).
5. *The prefill budget* is what the decodes leave, in tokens and in time, and is shared out so that a long prompt does
   not block short ones and every prompt ends (`engine.budget`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.budget import Prefill, PrefillPlaces, prefill_budget, split_prefill_budget
from engine.displacement import displace, standing_claim, yielding
from engine.preemption import Shortage, headroom
from pdcore.config import SHARING, SchedulerConfig
from pdcore.queueing import QueueState, Waiting, service_order
from pdcore.step_time import StepShape, StepTime
from pdcore.types import PriorityClass, RequestKey

MAX_PASSED_OVER = 16
"""Requests that may get blocks ahead of an older one that does not fit."""


class SequenceView(NamedTuple):
    """A sequence as the scheduler sees it.

    Attributes:
        key: who it is.
        known: tokens known. computed: of those, in the cache, or to be there upon admission (less than `known`).
        blocks: blocks held; 0 means that it waits for admission.
        admit_blocks: blocks that it holds when it is admitted.
        max_blocks: blocks that it can come to hold.
        has_credit: whether a token of it may be reported.
        preemptible: whether its blocks may be taken away.
        passed_over: how many younger requests have been given blocks while it waits.
        last_step: id of the last step it took part in.
        cached_blocks: of `admit_blocks`, those that the prefix cache has. used: of those, the ones that others use.
        shared: of its blocks, those that others hold too, and those that an interactive request which waits would
            take from the prefix cache (`SchedulerSnapshot.holders`); if memory is so short that it matters in this
            step, else perhaps none.
        swap_blocks: blocks of host memory that it takes if it is preempted; 0 if it is dropped then.
        stalled: its client has taken nothing for so long that its memory is for others.
        preempted: it has made no progress since it was preempted last.
        copying: its KV is being copied out (`blocks` is 0 then) or in: it can neither run nor be admitted.
        leaving_blocks: blocks that it gives up when it has been copied out.
        restores: its KV is in host memory, and is copied in when it is admitted.
        arrival, tenant, priority: as in `Waiting`. again: it had blocks before, and lost them.
        yields: it gives way to interactive requests, if the policy is `priority`.
    """

    key: RequestKey
    known: int
    computed: int
    blocks: int
    admit_blocks: int
    max_blocks: int
    has_credit: bool
    preemptible: bool
    passed_over: int
    last_step: int
    cached_blocks: int = 0
    used: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    swap_blocks: int = 0
    stalled: bool = False
    preempted: bool = False
    copying: bool = False
    leaving_blocks: int = 0
    restores: bool = False
    arrival: int = 0
    tenant: str = ""
    priority: PriorityClass = PriorityClass.STANDARD
    again: bool = False
    yields: bool = False

    @property
    def waiting(self) -> Waiting:
        """It as the queue's policy sees it."""
        return Waiting(self.arrival, self.known - self.computed, self.tenant, self.priority, self.again)

    @property
    def admit_cost(self) -> int:
        """By how much its admission lowers the number of free blocks."""
        return self.admit_blocks - len(self.used)

    @property
    def own_blocks(self) -> int:
        """Blocks that come free when it gives its blocks up, whoever else does."""
        return self.blocks + self.leaving_blocks - len(self.shared)

    @property
    def may_grow(self) -> bool:
        """Whether it is running, or will when it is copied in, and can come to need another block."""
        return 0 < self.blocks < self.max_blocks and self.has_credit and self.preemptible


class ClaimView(NamedTuple):
    """What the ticket of an interactive request needs that was refused: `blocks`, beside those that the prefix cache
    has for it and others use (`used`)."""

    blocks: int
    used: tuple[int, ...] = ()


class TicketView(NamedTuple):
    """An uncommitted ticket.

    `blocks`: those that were allocated for it, and come back with it; what it shares with the prefix cache is not
    counted. `revoking`: its revocation has been asked for, its blocks are not back yet.
    """

    owner: str
    blocks: int
    revoking: bool


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """All that a decision depends on. `sequences` and `tickets` are ordered oldest first.

    Attributes:
        free_blocks: blocks that nobody uses, those that the prefix cache would give up among them.
        swap_room: free blocks of host memory.
        wanted_blocks: blocks that a ticket lacked which was refused since the last step.
        queue: what the queue's policy knows. step_time: what steps take.
        claims: of tickets that were refused lately, the first refused first.
        holders: how many hold each of the blocks in the views' `shared`; what is missing never comes free.
    """

    sequences: tuple[SequenceView, ...]
    tickets: tuple[TicketView, ...]
    free_blocks: int
    block_size: int
    swap_room: int = 0
    wanted_blocks: int = 0
    queue: QueueState = field(default_factory=QueueState)
    step_time: StepTime = field(default_factory=StepTime)
    claims: tuple[ClaimView, ...] = ()
    holders: Mapping[int, int] = field(default_factory=dict)


class ScheduledChunk(NamedTuple):
    """`num_tokens` tokens of a sequence from `start` on, for which it first gets `new_blocks` more blocks.

    One that is admitted takes the blocks that the prefix cache has of it before that, and `start` is where they end.
    """

    key: RequestKey
    start: int
    num_tokens: int
    new_blocks: int


class PassedOver(NamedTuple):
    """A sequence that did not fit while `times` younger ones were admitted."""

    key: RequestKey
    times: int


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """What to do now, in this order.

    Attributes:
        preempt: sequences whose blocks are freed before anything is allocated.
        swap_out: sequences whose KV is copied to host memory; their blocks are freed then.
        swap_in: sequences that get blocks into which their KV is copied; they run when it is there.
        chunks: the step; chunks of one token come first.
        admitted: those of `chunks` that had no blocks before.
        passed_over: sequences to be compensated later.
        revoke: tickets whose revocation is to be asked for, in this order.
        sitting_out: decodes left out for lack of a block.
        bound_by: what kept prompts from getting more: ``memory``, ``itl`` (`target_itl_ms`), ``tokens`` (the token
            budget), ``seqs`` (`max_num_seqs`); empty if each that could get tokens had all it may have in a step.
    """

    preempt: tuple[RequestKey, ...] = ()
    chunks: tuple[ScheduledChunk, ...] = ()
    admitted: tuple[RequestKey, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()
    revoke: tuple[str, ...] = ()
    sitting_out: tuple[RequestKey, ...] = ()
    swap_out: tuple[RequestKey, ...] = ()
    swap_in: tuple[RequestKey, ...] = ()
    bound_by: str = ""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The sequences with blocks that take part, after preemption."""

    singles: list[ScheduledChunk]
    prefills: list[SequenceView]


@dataclass(slots=True)
class _Admission:
    """Waiting sequences that fit, and how often each that did not is passed over by each of them.

    `restored`: those of them whose KV is copied in, so that they take no part in this step.
    `lacking`: blocks that the first one lacked which did not fit. `no_place`: others wait that there is no place in
    the step for.
    """

    candidates: list[SequenceView]
    restored: list[SequenceView]
    passed_over_by: dict[RequestKey, list[RequestKey]]
    lacking: int = 0
    no_place: bool = False


def schedule(snapshot: SchedulerSnapshot, config: SchedulerConfig) -> ScheduleDecision:
    """Decide one step. See the module for the rules."""
    by_class = config.queue.policy == "priority"
    memory = Shortage(snapshot, yielding(snapshot.sequences, config), by_class=by_class)
    for view in displace(snapshot, config):
        memory.preempt(view)
    turn = _take_turns(snapshot, config, memory)
    most = config.max_num_batched_tokens - len(turn.singles)
    admission = _admit(snapshot, config, turn, memory, most)
    memory.make_room(max(admission.lacking, snapshot.wanted_blocks))
    prefills = sorted(turn.prefills + admission.candidates, key=lambda view: view.arrival)
    rows = [_prefill(view, snapshot, config) for view in prefills]
    decodes = StepShape(len(turn.singles), sum(chunk.start + 1 for chunk in turn.singles))
    budget = prefill_budget(decodes, rows, most, snapshot.step_time, config)
    shares = split_prefill_budget(rows, budget, config)

    chunks = list(turn.singles)
    longer: list[ScheduledChunk] = []
    admitted: list[RequestKey] = []
    for view, count in zip(prefills, shares, strict=True):
        # No budget reached it: a running one keeps its blocks, a waiting one takes none yet.
        if count == 0:
            continue
        waiting = view.blocks == 0
        if waiting:
            admitted.append(view.key)
        new_blocks = view.admit_blocks - view.cached_blocks if waiting else 0
        chunk = ScheduledChunk(view.key, view.computed, count, new_blocks)
        (chunks if count == 1 else longer).append(chunk)

    swap_in = [view.key for view in admission.restored]
    taken = {*admitted, *swap_in}
    passed_over = (
        PassedOver(key, sum(other in taken for other in others)) for key, others in admission.passed_over_by.items()
    )
    return ScheduleDecision(
        preempt=tuple(memory.dropped),
        chunks=tuple(chunks + longer),
        admitted=tuple(admitted),
        passed_over=tuple(entry for entry in passed_over if entry.times),
        revoke=tuple(memory.revoke),
        sitting_out=tuple(memory.sitting_out),
        swap_out=tuple(memory.swapped),
        swap_in=tuple(swap_in),
        bound_by=_bound_by(memory, admission, sum(shares), budget, most),
    )


def _bound_by(memory: Shortage, admission: _Admission, given: int, budget: int, most: int) -> str:
    """See `ScheduleDecision`."""
    if memory.taken or memory.sitting_out or admission.passed_over_by:
        return "memory"
    if given and given == most:
        return "tokens"
    if given and budget < most and given == budget:
        return "itl"
    return "seqs" if admission.no_place else ""


def _take_turns(snapshot: SchedulerSnapshot, config: SchedulerConfig, memory: Shortage) -> _Turn:
    """Choose among the sequences that hold blocks and find memory for those that grow (rules 1 to 3)."""
    block_size = snapshot.block_size
    ready = [view for view in snapshot.sequences if view.blocks and view.has_credit and not view.copying]
    turns = ready
    if len(ready) > config.max_num_seqs:
        # Who came by a ticket was not admitted one by one: here batch ones beyond their share leave the places.
        later = {view.key for view in yielding(ready, config)}
        turns = sorted(ready, key=lambda view: (view.key in later, view.last_step))  # stable: the older first

    singles: dict[RequestKey, ScheduledChunk] = {}
    prefills: dict[RequestKey, SequenceView] = {}
    for view in turns:
        if len(singles) + len(prefills) == config.max_num_seqs:
            break
        if view.key in memory.taken:
            continue
        # A prompt, or tokens lost to a preemption: it was admitted with all the blocks it needs.
        if view.known - view.computed > 1:
            prefills[view.key] = view
            continue
        # The token fits into the blocks at hand.
        if view.known <= view.blocks * block_size:
            singles[view.key] = ScheduledChunk(view.key, view.computed, 1, 0)
            continue
        while memory.free == 0 and (victim := memory.victim_for(view)) is not None:
            prefills.pop(victim.key, None)
            chunk = singles.pop(victim.key, None)
            memory.preempt(victim, chunk.new_blocks if chunk else 0)
        if memory.take_block(view):
            singles[view.key] = ScheduledChunk(view.key, view.computed, 1, 1)
    return _Turn(list(singles.values()), list(prefills.values()))


def _admit(
    snapshot: SchedulerSnapshot, config: SchedulerConfig, turn: _Turn, memory: Shortage, budget: int
) -> _Admission:
    """Find the waiting sequences that may get blocks (rule 4). Who of them does depends on the prefill budget."""
    admission = _Admission([], [], {})
    # Memory is short: who came in now would be the next to be thrown out.
    if memory.taken or memory.sitting_out:
        return admission
    arrived = [view for view in snapshot.sequences if not view.blocks and view.has_credit and not view.copying]
    if not arrived:
        return admission
    order = service_order([view.waiting for view in arrived], config.queue, snapshot.queue)
    partial = PrefillPlaces((view.known - view.computed for view in turn.prefills), config)

    places = config.max_num_seqs - sum(bool(view.blocks and view.has_credit) for view in snapshot.sequences)
    growers = sum(view.may_grow for view in snapshot.sequences)
    free = memory.free
    claim = standing_claim(snapshot, config)
    allowance = MAX_PASSED_OVER
    for view in (arrived[i] for i in order):
        # Each candidate is good for at least one token of budget and a place in the step; one that is copied in
        # needs the place only, and later.
        if len(admission.candidates) + len(admission.restored) >= places:
            admission.no_place = True
            break
        if not view.restores and len(admission.candidates) >= budget:
            break
        # Long, and enough of those are being computed: it holds nobody up, and nobody goes ahead that it waits for.
        missing = view.known - view.computed
        if partial.needed(missing) and not partial.take(missing):
            continue
        # Does not fit: look behind it, unless it has been passed over often enough.
        lacking = view.admit_cost + growers + headroom(view) - free
        if view.priority is not PriorityClass.INTERACTIVE and view.passed_over < MAX_PASSED_OVER:
            lacking += claim
        if lacking > 0:
            admission.lacking = admission.lacking or lacking
            allowance = min(allowance, MAX_PASSED_OVER - view.passed_over)
            if allowance <= 0:
                break
            admission.passed_over_by[view.key] = []
            continue
        (admission.restored if view.restores else admission.candidates).append(view)
        free -= view.admit_cost
        growers += view.preemptible and view.admit_blocks < view.max_blocks
        if not admission.passed_over_by:
            continue
        for others in admission.passed_over_by.values():
            others.append(view.key)
        allowance -= 1
        if allowance <= 0:
            break
    return admission


def _prefill(view: SequenceView, snapshot: SchedulerSnapshot, config: SchedulerConfig) -> Prefill:
    """A sequence as the budget sees it. Its rank is by class and tenant, if the queue's policy goes by these."""
    policy = config.queue.policy
    by_class = float(view.priority) if policy == "priority" else 0.0
    had = snapshot.queue.counters.get(view.tenant, 0.0) if policy in SHARING else 0.0
    rank = (by_class, had)
    return Prefill(view.known - view.computed, view.computed, view.blocks > 0, rank, view.priority)


def ticket_refusal(
    snapshot: SchedulerSnapshot,
    blocks: int,
    max_reserved_blocks: int,
    idle_blocks: int = 0,
    *,
    claimed_blocks: int = 0,
    claimed_share: int = 0,
) -> str | None:
    """Why a ticket may not be granted now; None if it may.

    Args:
        blocks: blocks that it needs beside those that the prefix cache has for it.
        max_reserved_blocks: blocks that all tickets together may hold, not counting shared ones.
        idle_blocks: of the cached ones, those that nobody uses and that the ticket would pin.
        claimed_blocks: kept for tickets that go before it. claimed_share: of `max_reserved_blocks`, likewise.
    """
    if tickets_are_full(snapshot, blocks + claimed_share, max_reserved_blocks):
        return f"tickets hold as many as they may of {max_reserved_blocks} blocks"
    lacking = ticket_lacks(snapshot, blocks, idle_blocks) + claimed_blocks
    if lacking > 0:
        return f"{snapshot.free_blocks} blocks are free, {lacking} too few beside what running sequences may need"
    # Blocks that come free belong to a request that has been passed over too often.
    if any(
        not view.blocks and view.has_credit and view.passed_over >= MAX_PASSED_OVER for view in snapshot.sequences
    ):
        return "a waiting request has been passed over too often"
    return None


def tickets_are_full(snapshot: SchedulerSnapshot, blocks: int, max_reserved_blocks: int) -> bool:
    """Whether so many more blocks are too much for all tickets together."""
    reserved = sum(ticket.blocks for ticket in snapshot.tickets)
    # The only ticket may be larger: a long prompt would be refused by an idle worker for ever otherwise.
    return reserved > 0 and reserved + blocks > max_reserved_blocks


def ticket_lacks(snapshot: SchedulerSnapshot, blocks: int, idle_blocks: int = 0) -> int:
    """Blocks that would have to come free for such a ticket, a block of growth for each running sequence included;
    at most 0 if it fits. Arguments as for `ticket_refusal`."""
    growers = sum(view.may_grow for view in snapshot.sequences)
    return blocks + idle_blocks + growers - snapshot.free_blocks
