"""Which running batch requests give way to interactive ones that wait, under the queue policy `priority`. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.preemption import headroom
from pdcore.config import SchedulerConfig
from pdcore.types import PriorityClass

if TYPE_CHECKING:  # the scheduler imports this module
    from engine.scheduler import SchedulerSnapshot, SequenceView


def kept_batch(config: SchedulerConfig) -> int:
    """Batch sequences that keep their places whoever waits: the oldest ones, so that they end."""
    return math.ceil(config.max_num_seqs * config.queue.batch_share)


def yielding(views: list[SequenceView], config: SchedulerConfig) -> list[SequenceView]:
    """Of sequences (the oldest first), those that may have to give way, in the order in which they would."""
    if config.queue.policy != "priority":
        return []
    batch = [view for view in views if view.blocks and view.priority is PriorityClass.BATCH]
    return [view for view in reversed(batch[kept_batch(config) :]) if view.yields]


def displace(snapshot: SchedulerSnapshot, config: SchedulerConfig) -> list[SequenceView]:
    """Batch sequences to be preempted now, the youngest first, so that interactive ones can be admitted.

    Interactive requests are looked at in order of arrival, up to the first for which all that may give way would not
    be enough: nothing is taken away for nothing.
    """
    interactive = [
        view
        for view in snapshot.sequences
        if not view.blocks and view.has_credit and not view.copying and view.priority is PriorityClass.INTERACTIVE
    ]
    if not interactive:
        return []
    victims = yielding(list(snapshot.sequences), config)
    running = [view for view in snapshot.sequences if view.blocks]
    places = config.max_num_seqs - sum(view.has_credit for view in running)
    # Blocks beyond those by which every running sequence may grow, those that are on their way back among them.
    free = snapshot.free_blocks - sum(view.may_grow for view in running)
    free += sum(view.leaving_blocks for view in snapshot.sequences)
    displaced: list[SequenceView] = []
    for view in interactive:
        grows = view.preemptible and view.admit_blocks < view.max_blocks
        needed = view.admit_cost + headroom(view)
        taken: list[SequenceView] = []
        new_places, new_free = places, free
        for victim in victims[len(displaced) :]:
            if new_places >= 1 and new_free >= needed:
                break
            taken.append(victim)
            new_places += victim.has_credit
            new_free += victim.blocks - victim.shared_blocks + victim.may_grow
        if new_places < 1 or new_free < needed:
            break
        displaced += taken
        places, free = new_places - 1, new_free - view.admit_cost - grows
    return displaced
