"""Which running batch requests give way to interactive ones, under the queue policy `priority`. Pure.

An interactive request waits here for its turn, or elsewhere for a ticket: what a refused ticket needs is a *claim* on
memory. Batch requests give way for it, and what comes free is kept for it, from other tickets too, until it is asked
for again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.preemption import headroom
from pdcore.config import SchedulerConfig
from pdcore.types import PriorityClass

if TYPE_CHECKING:  # the scheduler imports this module
    from engine.scheduler import SchedulerSnapshot, SequenceView


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

    First the claims, then those that wait in order of arrival, up to the first for which all that may give way would
    not be enough: nothing is taken away for nothing.
    """
    interactive = [
        view
        for view in snapshot.sequences
        if not view.blocks and view.has_credit and not view.copying and view.priority is PriorityClass.INTERACTIVE
    ]
    claim = standing_claim(snapshot, config)
    if not interactive and not claim:
        return []
    victims = yielding(snapshot.sequences, config)
    places = config.max_num_seqs - sum(bool(view.blocks and view.has_credit) for view in snapshot.sequences)
    free = _free(snapshot)
    displaced = 0
    while claim and free < claim:
        places += victims[displaced].has_credit
        free += _frees(victims[displaced])
        displaced += 1
    free -= claim
    for view in interactive:
        grows = view.preemptible and view.admit_blocks < view.max_blocks
        needed = view.admit_cost + headroom(view)
        taken, new_places, new_free = 0, places, free
        for victim in victims[displaced:]:
            if new_places >= 1 and new_free >= needed:
                break
            taken += 1
            new_places += victim.has_credit
            new_free += _frees(victim)
        if new_places < 1 or new_free < needed:
            break
        displaced += taken
        places, free = new_places - 1, new_free - view.admit_cost - grows
    return victims[:displaced]


def standing_claim(snapshot: SchedulerSnapshot, config: SchedulerConfig) -> int:
    """Blocks that are kept for interactive requests' tickets: of the claims the first ones, as far as they can be
    had if all give way that may."""
    if not snapshot.claims or config.queue.policy != "priority":
        return 0
    most = _free(snapshot) + sum(map(_frees, yielding(snapshot.sequences, config)))
    return max(total for total in (0, *accumulate(snapshot.claims)) if total == 0 or total <= most)


def _free(snapshot: SchedulerSnapshot) -> int:
    """Blocks beyond those by which every running sequence may grow, those that are on their way back among them."""
    return snapshot.free_blocks + sum(view.leaving_blocks - view.may_grow for view in snapshot.sequences)


def _frees(victim: SequenceView) -> int:
    """Blocks that come free if it gives way, that of its growth among them."""
    return victim.blocks - victim.shared_blocks + victim.may_grow
