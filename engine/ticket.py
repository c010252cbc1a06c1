"""An engine's part of a KV transfer that has not been committed: blocks that wait for what others compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdcore.types import PriorityClass, RequestSpec

if TYPE_CHECKING:  # this module is pure
    from engine.structured import OutputState


CLAIM_S = 0.6
"""Seconds that a claim lasts: a little more than ever passes until a router asks again."""


class Reservation(NamedTuple):
    """What a ticket came to hold.

    Attributes:
        blocks: the whole block table; those of the first `prefix_tokens` tokens are shared and must not be written.
        prefix_tokens: tokens whose KV is in place; whole blocks, and less than what the request knows.
        run_here: so little is missing that this engine would rather compute it (see `pdcore.placement`).
    """

    blocks: list[int]
    prefix_tokens: int
    run_here: bool


class Claim(NamedTuple):
    """What an interactive request's ticket needs that was refused: `blocks`, until the time `until`."""

    blocks: int
    until: float

    def blocks_at(self, now: float) -> int:
        """Blocks that are claimed now; whoever needs them still asks for them again before a claim ends."""
        return self.blocks if now < self.until else 0


@dataclass(slots=True)
class Ticket:
    """An uncommitted ticket, whose blocks the block manager knows.

    Attributes:
        spec: the request that it is for; None if only the number of its tokens is known.
        hashes: names of the full blocks of what the request knows.
        revoking: its revocation has been asked for.
        outputs: where structured outputs stand, for each of the request's samples; None where it is free.
    """

    spec: RequestSpec | None
    hashes: list[bytes]
    revoking: bool = False
    outputs: tuple[OutputState | None, ...] = (None,)

    @property
    def interactive(self) -> bool:
        """Whether it is for an interactive request."""
        return self.spec is not None and self.spec.priority is PriorityClass.INTERACTIVE

    def is_for(self, spec: RequestSpec) -> bool:
        """Whether KV of `spec` is what was reserved, as far as is known."""
        mine = self.spec
        return mine is None or (mine.known_tokens == spec.known_tokens and mine.cache_salt == spec.cache_salt)
