"""Ranges of KV heads: what each rank of a tensor-parallel worker holds, sends or takes. Pure.

Heads are counted in the model, not in the rank. Prefill and decode workers may be split differently: each sender
sends each endpoint the heads that both have, and a ticket is filled once its senders' ranges cover it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pdcore.errors import TicketError
from pdcore.types import KvGeometry, KvTicket


class HeadRange(NamedTuple):
    """Heads ``[start, start + size)`` of a model."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size

    def overlap(self, other: HeadRange) -> HeadRange | None:
        """The heads that both have; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return HeadRange(start, stop - start) if start < stop else None

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


NO_HEADS: Final = HeadRange(0, 0)


def heads_of(geometry: KvGeometry) -> HeadRange:
    """The heads that a cache of this geometry holds."""
    return HeadRange(geometry.head_start, geometry.num_kv_heads)


def covered(whole: HeadRange, parts: Iterable[HeadRange]) -> bool:
    """`parts`, which do not overlap, hold every head of `whole`."""
    overlaps = (whole.overlap(part) for part in parts)
    return sum(overlap.size for overlap in overlaps if overlap is not None) == whole.size


def join_tickets(tickets: Sequence[KvTicket]) -> KvTicket:
    """The ticket of a tensor-parallel decode worker: what its ranks granted for one request, as one.

    Raises:
        TicketError: the tickets are for different tokens or overlapping heads, or no codec is accepted by all.
    """
    first = tickets[0]
    endpoints = [endpoint for ticket in tickets for endpoint in ticket.endpoints]
    ranges = sorted(HeadRange(endpoint.head_start, endpoint.head_count) for endpoint in endpoints)
    if any((t.prefix_tokens, t.num_tokens) != (first.prefix_tokens, first.num_tokens) for t in tickets):
        tokens = ", ".join(f"[{ticket.prefix_tokens}, {ticket.num_tokens})" for ticket in tickets)
        raise TicketError(f"tickets of one request for different tokens: {tokens}")
    if any(one.overlap(other) for one, other in pairwise(ranges)):
        raise TicketError(f"tickets of one request for overlapping heads: {', '.join(map(str, ranges))}")
    codecs = tuple(codec for codec in first.codecs if all(codec in ticket.codecs for ticket in tickets))
    if not codecs:
        raise TicketError(f"no codec that every rank accepts: {'; '.join(', '.join(t.codecs) for t in tickets)}")
    return KvTicket(
        num_tokens=first.num_tokens,
        prefix_tokens=first.prefix_tokens,
        lease_s=min(ticket.lease_s for ticket in tickets),
        codecs=codecs,
        endpoints=tuple(endpoints),
        run_here=any(ticket.run_here for ticket in tickets),
    )
