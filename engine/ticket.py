"""An engine's part of a KV transfer that has not been committed: blocks that wait for what others compute. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from engine.scheduler import ClaimView
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


class _Claim(NamedTuple):
    """See `Claims.make`."""

    blocks: int
    names: tuple[bytes, ...]
    fresh: int
    until: float
    memory: bool


class Ahead(NamedTuple):
    """What goes before a ticket: so many claims on memory, and blocks of the share of all tickets together."""

    claims: int
    share: int


class Claims:
    """What tickets of interactive requests need that were refused, the first refused first. Not thread-safe.

    A claim ends when its ticket is granted, or when nobody has asked for it for `CLAIM_S`.
    """

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def make(
        self, request_id: str, blocks: int, now: float, *, memory: bool, fresh: int = 0, names: Sequence[bytes] = ()
    ) -> None:
        """The request's ticket is refused; it keeps the place that it has.

        Args:
            blocks: that it needs in all. names: of those that the prefix cache has for it. fresh: those that count
                against the share of all tickets.
            memory: it was refused for want of that, and not because other tickets hold their share.
        """
        self._claims[request_id] = _Claim(blocks, tuple(names), fresh, now + CLAIM_S, memory)

    def drop(self, request_id: str) -> None:
        """Its ticket is granted. Idempotent."""
        self._claims.pop(request_id, None)

    def views(self, now: float, used: Callable[[Sequence[bytes]], Sequence[int]]) -> tuple[ClaimView, ...]:
        """The claims on memory that stand. `used`: cached blocks of these names that others use."""
        self._claims = {name: claim for name, claim in self._claims.items() if now < claim.until}
        found = ((claim.blocks, tuple(used(claim.names))) for claim in self._claims.values() if claim.memory)
        return tuple(ClaimView(blocks - len(mine), mine) for blocks, mine in found)

    def ahead(self, request_id: str) -> Ahead:
        """Of the claims that were made before that of this request; of all, if it has none."""
        before = list(takewhile(lambda name: name != request_id, self._claims))
        claims = [self._claims[name] for name in before]
        return Ahead(sum(claim.memory for claim in claims), sum(claim.fresh for claim in claims))


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
    def claimant(self) -> str:
        """The interactive request that it is for; empty if it is for no such one."""
        spec = self.spec
        return spec.key.request_id if spec is not None and spec.priority is PriorityClass.INTERACTIVE else ""

    def is_for(self, spec: RequestSpec) -> bool:
        """Whether KV of `spec` is what was reserved, as far as is known."""
        mine = self.spec
        return mine is None or (mine.known_tokens == spec.known_tokens and mine.cache_salt == spec.cache_salt)
