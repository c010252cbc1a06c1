"""Whose memory is taken when blocks run short, and in which way. Pure.

A preempted sequence is *swapped* (its KV goes to host memory, and comes back when there is room) or *dropped* (its
blocks are freed, and what the prefix cache does not keep of them is computed again). Of its tokens, from the front::

    |<- held: in blocks that others use too ->|<- kept: cached, and not wanted by others ->|<- lost ->|
    |<------------------------------------ computed: in the cache now ------------------------------->|

    swap       copies kept + lost out, lost back      bytes over the measured speed of such copies
    recompute  computes lost again                    tokens over the measured rate of prefills, times a weight

Held tokens stay in the cache in either case, so they are neither copied nor computed. The weight is 1 where prompts
are computed anyway, and `DECODE_WEIGHT` on a decode worker, whose streams all wait while it computes tokens again.

What keeps sequences from being thrown out again and again:

* One that was preempted is not chosen again before it has a new token (``SequenceView.preempted``).
* It comes back only where there is room for `HEADROOM_BLOCKS` more than it needs at once, if it can ever need them.
* Memory that is on its way back (copies out, revoked tickets) is waited for before another one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from engine.releases import Releases
from pdcore.config import PREEMPT_BY_RECOMPUTE, PREEMPT_BY_SWAP
from pdcore.types import PriorityClass

if TYPE_CHECKING:  # the scheduler imports this module
    from engine.scheduler import SchedulerSnapshot, SequenceView
    from pdcore.types import RequestKey

HEADROOM_BLOCKS = 1
"""Blocks beside those of its next token that must be free for a preempted sequence to come back."""

STALL_S = 1.0
"""Seconds without credit after which a client counts as stalled: its sequence gives way to any that could run."""

DECODE_WEIGHT = 4.0
"""How much worse a second of recomputing is than one of copying, on a decode worker."""

ASSUMED_COPY_BYTES_S = 2e9
ASSUMED_PREFILL_TOKENS_S = 500.0
"""What is assumed until something has been measured."""

_KEEP = 0.8


class Rate:
    """Units per second over the recent past: each measurement counts by its size, and fades as new ones come."""

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Take a measurement; one without an extent says nothing, and is ignored."""
        if units > 0 and seconds > 0:
            self._units = _KEEP * self._units + units
            self._seconds = _KEEP * self._seconds + seconds

    @property
    def per_second(self) -> float:
        return self._units / self._seconds if self._seconds else self._assumed


class Loss(NamedTuple):
    """Tokens of a sequence by what would become of them if it were preempted; see the module."""

    computed: int
    held: int = 0
    kept: int = 0

    @property
    def lost(self) -> int:
        return self.computed - self.held - self.kept


@dataclass(frozen=True, slots=True)
class PreemptionTerms:
    """What decides between swap and recompute, beside the sequence itself.

    Attributes:
        mode: one of `pdcore.config.PREEMPTION_MODES`.
        bytes_per_token: K and V of one token.
        out_bytes_s, in_bytes_s: speed of copies to host memory and back.
        prefill_tokens_s: rate at which tokens are computed again. recompute_weight: see the module.
    """

    mode: str = PREEMPT_BY_RECOMPUTE
    bytes_per_token: int = 0
    out_bytes_s: float = ASSUMED_COPY_BYTES_S
    in_bytes_s: float = ASSUMED_COPY_BYTES_S
    prefill_tokens_s: float = ASSUMED_PREFILL_TOKENS_S
    recompute_weight: float = 1.0


def swap_seconds(loss: Loss, terms: PreemptionTerms) -> float:
    """Seconds of copying, out and back."""
    out = loss.computed - loss.held
    return terms.bytes_per_token * (out / terms.out_bytes_s + loss.lost / terms.in_bytes_s)


def recompute_seconds(loss: Loss, terms: PreemptionTerms) -> float:
    """Weighted seconds of computing again what is lost."""
    return terms.recompute_weight * loss.lost / terms.prefill_tokens_s


def swap_is_better(loss: Loss, terms: PreemptionTerms) -> bool:
    """Whether a sequence with this loss had better be swapped, if host memory has room for it."""
    # Nothing would be copied: others hold all that it has.
    if loss.computed == loss.held or terms.mode == PREEMPT_BY_RECOMPUTE:
        return False
    if terms.mode == PREEMPT_BY_SWAP:
        return True
    return swap_seconds(loss, terms) < recompute_seconds(loss, terms)


def expected_kept(freed_blocks: int, cached_blocks: int, wanted_blocks: int) -> int:
    """Blocks of a preempted sequence that the prefix cache will still have when it comes back, if all goes badly.

    Args:
        freed_blocks: that come free with it. cached_blocks: those of them that are in the prefix cache.
        wanted_blocks: that all others can come to need at most. They take what is not cached first.
    """
    return max(0, min(cached_blocks, freed_blocks - wanted_blocks))


def headroom(view: SequenceView) -> int:
    """Blocks that must be free beside `admit_blocks` for a waiting sequence to be admitted."""
    return min(HEADROOM_BLOCKS, view.max_blocks - view.admit_blocks) if view.preempted else 0


class Shortage:
    """Memory for those who lack it, while one decision is being made: the scheduler's rule 3.

    Attributes:
        free: blocks that can be given now.
        dropped, swapped: sequences preempted in either way. revoke: tickets to be asked back, in this order.
        sitting_out: decodes that get no block in this step.

    Args:
        yielding: who gives way to interactive sequences, in this order.
        by_class: batch sequences take from their like first.
    """

    def __init__(
        self, snapshot: SchedulerSnapshot, yielding: Sequence[SequenceView] = (), *, by_class: bool = False
    ) -> None:
        self.free = snapshot.free_blocks
        self.dropped: list[RequestKey] = []
        self.swapped: list[RequestKey] = []
        self.revoke: list[str] = []
        self.sitting_out: list[RequestKey] = []
        self.taken: set[RequestKey] = set()
        self._sequences = snapshot.sequences
        self._yielding = yielding
        self._by_class = by_class
        self._room = snapshot.swap_room
        self._releases = Releases(snapshot.holders)
        self._late: set[int] = set()  # held by a copy out until that has ended
        self._has_tickets = bool(snapshot.tickets)
        self._revocable = [ticket for ticket in snapshot.tickets if not ticket.revoking]
        self._returning = sum(ticket.blocks for ticket in snapshot.tickets if ticket.revoking)
        for view in snapshot.sequences:
            if view.leaving_blocks:
                self._leaves(view)

    def victim_for(self, needy: SequenceView) -> SequenceView | None:
        """Who gives its memory to `needy`, which lacks a block; None if it had better sit out."""
        # Each one that sits out waits for one block. One more is on its way already.
        if self._returning > len(self.sitting_out):
            return None
        first = self._frees_one(self._stalled())
        if first is None and needy.priority is PriorityClass.INTERACTIVE:
            first = self._frees_one([view for view in self._yielding if view.key not in self.taken])
        if first is not None:
            return first
        # Transfers that have not been paid for in steps yet go before anything that runs.
        if self._has_tickets:
            return None
        holders = [
            view for view in self._sequences if view.blocks and view.preemptible and view.key not in self.taken
        ]
        # The youngest that runs and has made progress gives way, unless that is `needy` itself.
        younger = list(takewhile(lambda view: view.key != needy.key, reversed(holders)))
        willing = [view for view in younger if view.has_credit and not view.copying and not view.preempted]
        if self._by_class and needy.priority is PriorityClass.BATCH:
            willing = self._of_batch(needy, willing)
        if willing:
            return willing[0]
        # Others run (or will, when their copy is in), and will end or preempt `needy`: until then it keeps its own.
        if any(view.has_credit and view.key != needy.key for view in holders):
            return None
        # Nobody else could use the memory: a client that takes nothing must not stop one that does.
        return next((view for view in reversed(holders) if not view.has_credit), None)

    def _of_batch(self, needy: SequenceView, willing: list[SequenceView]) -> list[SequenceView]:
        """From whom a batch sequence takes: from its like first, from interactive ones only if they could not take
        from it in turn. Otherwise one would wait for the other."""
        like = [view for view in willing if view.priority is PriorityClass.BATCH]
        gives = self._releases.gain(needy) > 0 and any(view.key == needy.key for view in self._yielding)
        return like or [view for view in willing if not gives or view.priority is not PriorityClass.INTERACTIVE]

    def preempt(self, victim: SequenceView, undone_blocks: int = 0) -> None:
        """Take a victim's memory. `undone_blocks`: given to it by this very decision, and free again."""
        self.taken.add(victim.key)
        self.free += undone_blocks
        if 0 < victim.swap_blocks <= self._room:
            self._room -= victim.swap_blocks
            self.swapped.append(victim.key)
            self._leaves(victim)
            return
        self.dropped.append(victim.key)
        later = sum(block in self._late for block in self._releases.last(victim))
        self.free += self._releases.gain(victim) - later
        self._returning += later
        self._releases.take(victim)

    def _leaves(self, view: SequenceView) -> None:
        """Its blocks come back when they are copied."""
        self._returning += self._releases.gain(view)
        self._releases.take(view)
        self._late.update(view.shared)

    def take_block(self, needy: SequenceView) -> bool:
        """Give `needy` a block; if there is none, it sits out, and tickets are asked back for it if need be."""
        if self.free > 0:
            self.free -= 1
            return True
        self.sitting_out.append(needy.key)
        while self._returning < len(self.sitting_out) and self._revocable:
            ticket = self._revocable.pop()
            self.revoke.append(ticket.owner)
            self._returning += ticket.blocks
        return False

    def make_room(self, lacking: int) -> None:
        """Preempt stalled sequences for a request that lacks so many blocks, if that is of any help to it."""
        lacking -= self._returning
        if lacking <= 0:
            return
        victims = self._releases.fewest(self._stalled(), self._releases.blocks + lacking) or []
        for view in victims:
            self._releases.put_back(view)
        for view in victims:
            self.preempt(view)

    def _frees_one(self, candidates: Sequence[SequenceView]) -> SequenceView | None:
        """The first of them with which a block comes free; else the first of those with which one does in the end."""
        for view in candidates:
            if self._releases.gain(view) > 0:
                return view
        together = self._releases.fewest(candidates, self._releases.blocks + 1) or []
        for view in together:
            self._releases.put_back(view)
        return together[0] if together else None

    def _stalled(self) -> list[SequenceView]:
        """Sequences of stalled clients, the longest stalled first."""
        stalled = [view for view in self._sequences if view.stalled and view.blocks and view.key not in self.taken]
        return sorted(stalled, key=lambda view: view.last_step)
