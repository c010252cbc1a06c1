"""Batch requests fill the gaps: on which workers one more would break the pace of others. Pure.

A worker generates one token of each of its requests a step, so its next step's length is what its clients see between
two tokens. One batch request more is held back where that length, by the worker's step-time model, would exceed the
shortest `itl_ms` of the classes that this router has requests of there. Where there are none, batch takes all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdcore.classes import ClassObjectives
from pdcore.types import PriorityClass
from router.fleet import Fleet, Mask


class HeldBack(NamedTuple):
    """What a request waits for that fills gaps. `closed`: workers that it is not to be started on, of the fleet as it
    is now; None if there are none. `waits`: these are all that generate."""

    closed: Mask | None = None
    waits: bool = False


def closed_to_batch(fleet: Fleet, prompt_tokens: int, classes: ClassObjectives) -> Mask:
    """The workers that a batch request is kept from, of a settled fleet; none of those that only compute prompts."""
    bound = np.full(len(fleet), np.inf)
    for priority in PriorityClass:
        itl_ms = classes.of(priority).itl_ms
        if itl_ms:
            bound = np.where(fleet.mine(priority) > 0, np.minimum(bound, itl_ms), bound)
    # One token of each request there and of one more.
    next_step_ms = fleet.stream_ms + fleet.stream_attended_ms * prompt_tokens
    return np.asarray(fleet.generating & fleet.known & (next_step_ms > bound))
