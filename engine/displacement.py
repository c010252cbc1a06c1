"""Which running batch requests give way to interactive ones, under the queue policy `priority`. Pure.

An interactive request waits here for its turn, or elsewhere for a ticket: what a refused ticket needs is a *claim* on
memory. Batch requests give way for it, and what comes free is kept for it, from other tickets too, until it is asked
for again.

What batch requests share among themselves comes free with the last of them. What is in the prefix cache for the
interactive one costs it nothing only as long as somebody else holds it: such blocks do not count as coming free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.preemption import headroom
from engine.releases import Releases
from pdcore.config import SchedulerConfig
from pdcore.types import PriorityClass

if TYPE_CHECKING:  # the scheduler imports this module
    from engine.scheduler import ClaimView, SchedulerSnapshot, SequenceView


def kept_batch(config: SchedulerConfig) -> int:
    """Batch sequences that keep their places whoever waits: the oldest ones, so that they end."""
    return math.ceil(config.max_num_seqs * config.queue.batch_share)


def yielding(views: Sequence[SequenceView], config: SchedulerConfig) -> list[SequenceView]:
    """Of sequences (the oldest first), those that may have to give way, in the order in which they would."""
    if config.queue.policy != "priority":
        return []
    batch = [view for view in views if view.blocks and view.priority is PriorityClass.BATCH]
    return [view for view in reversed(batch[kept_batch(config) :]) if view.yields]


def displace(snapshot: SchedulerSnapshot, config: SchedulerConfig) -> list[SequenceView]:
    """Batch sequences to be preempted now, the youngest first, so that interactive requests can be served.

    First the claims in their order, then those that wait in order of arrival, each up to the first for which all that
    may give way would not be enough. Nothing is taken away for nothing: without any one of these sequences fewer
    would be served.
    """
    interactive = [
        view
        for view in snapshot.sequences
        if not view.blocks and view.has_credit and not view.copying and view.priority is PriorityClass.INTERACTIVE
    ]
    if config.queue.policy != "priority" or not (interactive or snapshot.claims):
        return []
    # Who can be served as things are is served in this step if nobody gives way, and in the next one else.
    at_once = _Served(snapshot, [], config, steps=1)
    in_the_end = _Served(snapshot, yielding(snapshot.sequences, config), config, steps=2)
    counts = [_serve(served, snapshot.claims, interactive) for served in (at_once, in_the_end)]
    return in_the_end.by_whom() if counts[0] < counts[1] else []


def _serve(served: _Served, claims: Sequence[ClaimView], interactive: Sequence[SequenceView]) -> tuple[int, int]:
    """Serve claims and sequences that wait, each up to the first that cannot be; how many of either could."""
    first = next((i for i, claim in enumerate(claims) if not served.add(claim.blocks, claim.used)), len(claims))
    for number, view in enumerate(interactive):
        grows = view.preemptible and view.admit_blocks < view.max_blocks
        if not served.add(view.admit_cost, view.used, spare=headroom(view), grows=grows, place=True):
            return first, number
    return first, len(interactive)


def standing_claim(snapshot: SchedulerSnapshot, config: SchedulerConfig, first: int | None = None) -> int:
    """Blocks that are kept for interactive requests' tickets: of the claims (or of the `first` ones) those in front,
    as far as they can be had if all give way that may."""
    if not snapshot.claims or config.queue.policy != "priority":
        return 0
    served = _Served(snapshot, yielding(snapshot.sequences, config), config)
    for claim in snapshot.claims[:first]:
        if not served.add(claim.blocks, claim.used):
            break
    return served.blocks


class _Served:
    """Interactive requests that can be served, one after another, if all that are willing give way.

    Attributes:
        blocks, places: that those take. A block that may be needed for growth is kept for each.

    Args:
        willing: in the order in which they give way.
        steps: they are admitted in the so-manieth step from now on.
    """

    def __init__(
        self, snapshot: SchedulerSnapshot, willing: Sequence[SequenceView], config: SchedulerConfig, steps: int = 2
    ) -> None:
        self.blocks = 0
        self.places = 0
        self._spare = 0
        self._used: set[int] = set()
        self._again = 0
        self._willing = willing
        self._holders = snapshot.holders
        self._leaving = [view for view in snapshot.sequences if view.leaving_blocks]
        # What is there already, beside what is on its way back.
        self._block_size = snapshot.block_size
        self._steps = steps
        self._free_blocks = snapshot.free_blocks - sum(map(self._growth, snapshot.sequences))
        self._free_places = config.max_num_seqs - sum(
            bool(view.blocks and view.has_credit) for view in snapshot.sequences
        )
        self._all = self._releases()
        for view in self._willing:
            self._all.take(view)

    def _growth(self, view: SequenceView) -> int:
        """Blocks that it may take until those are admitted, and the one that must be free for it beside them."""
        if not view.may_grow:
            return 0
        before, after = view.blocks, view.blocks
        if view.known - view.computed == 1 and not view.copying:
            before = max(before, -(-(view.known + self._steps - 2) // self._block_size))
            after = max(before, -(-(view.known + self._steps - 1) // self._block_size))
        # It grows before anybody is admitted, and the reserve goes by what it had then.
        return min(after, view.max_blocks) - view.blocks + (before < view.max_blocks)

    def _releases(self) -> Releases:
        releases = Releases(self._holders, growth=self._growth, kept=self._used)
        for view in self._leaving:
            releases.take(view)
        releases.places = 0  # those have none
        return releases

    def add(
        self, blocks: int, used: Sequence[int], *, spare: int = 0, grows: bool = False, place: bool = False
    ) -> bool:
        """Serve one more, that takes so many blocks, and a place if it is to run here. False if it cannot be.

        Args:
            used: cached blocks that it gets beside those, for nothing as long as others hold them.
            spare: that must be free beside its own. grows: it may come to need one more.
        """
        again = sum(self._all.is_free(block) and block not in self._used for block in used)
        blocks_left = self._free_blocks + self._all.blocks - self.blocks - self._again
        if blocks + again + spare > blocks_left:
            return False
        if place and self._free_places + self._all.places <= self.places:
            return False
        self.blocks += blocks + grows
        self.places += place
        self._again += again
        self._used.update(used)
        self._spare = spare - grows  # the last one may come to need that later
        return True

    def by_whom(self) -> list[SequenceView]:
        """Who has to give way for those: no more than it takes, the youngest first."""
        if not self.blocks:
            return []
        blocks = self.blocks + self._spare - self._free_blocks
        places = self.places - self._free_places if self.places else 0
        gone = self._releases().fewest(self._willing, blocks, places)
        assert gone is not None, "what was promised cannot be had"
        return gone
