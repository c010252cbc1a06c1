"""From a ticket to a send: what can be refused at once is refused here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.codecs.registry import CodecRegistry
from kv_transfer.frames import MAX_FRAME_TOKENS, FrameLimits
from kv_transfer.head_ranges import HeadRange, covered, heads_of
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.negotiation import AUTO, GRPC
from kv_transfer.outbound import Delivery, Peer, Send
from kv_transfer.session import SendPlan, SendSession
from kv_transfer.transport import SendOutcome
from pdcore.config import TransferConfig
from pdcore.errors import TransferError
from pdcore.types import DTYPE_BYTES, KvEndpoint, KvGeometry, KvTicket, RequestKey

_OTHER_WAYS: Final = {AUTO: 2, GRPC: 0}
"""Ways that a frame may have to leave before it has tried them all, by configured transport; one for the others."""


class SendMaker:
    """Makes the sends of one sender.

    Args:
        geometry: of the cache that is read. config: bounds and preferences. codecs: those that can be used.
    """

    def __init__(self, geometry: KvGeometry, config: TransferConfig, codecs: CodecRegistry) -> None:
        self._geometry = geometry
        self._config = config
        self._codecs = codecs

    def make(
        self,
        key: RequestKey,
        ticket: KvTicket,
        block_ids: Sequence[int],
        on_done: Callable[[SendOutcome], None],
        *,
        codec: str,
        now: float,
    ) -> Delivery:
        """The sends that fill `ticket`, made at clock reading `now`; arguments and errors as for `KvSender.open`."""
        geometry = self._geometry
        if not 0 <= ticket.prefix_tokens < ticket.num_tokens <= len(block_ids) * geometry.block_size:
            raise refusal(
                f"a ticket for tokens [{ticket.prefix_tokens}, {ticket.num_tokens}) and {len(block_ids)} blocks of "
                f"{geometry.block_size} tokens"
            )
        self._codecs.usable(ticket.codecs, geometry.dtype)
        delivery = Delivery(key, on_done, now)
        delivery.sends = tuple(
            self._send(delivery, ticket, endpoint, heads, block_ids=tuple(block_ids), codec=codec)
            for endpoint, heads in self._destinations(ticket)
        )
        delivery.open = len(delivery.sends)
        return delivery

    def _send(
        self,
        delivery: Delivery,
        ticket: KvTicket,
        endpoint: KvEndpoint,
        heads: HeadRange,
        *,
        block_ids: tuple[int, ...],
        codec: str,
    ) -> Send:
        limits = FrameLimits.for_ticket(
            ref=TicketRef(endpoint.ticket_id, endpoint.generation),
            key=delivery.key,
            geometry=self._geometry,
            token_start=ticket.prefix_tokens,
            token_end=ticket.num_tokens,
            codecs=ticket.codecs,
            heads=heads,
        )
        now = delivery.opened_at
        return Send(
            delivery=delivery,
            session=SendSession(self._plan(limits)),
            limits=limits,
            asked=codec or self._config.codec,
            asked_by="the request or its class" if codec else "the configuration",
            block_ids=block_ids,
            peer=Peer(endpoint.address, endpoint.worker_incarnation, now, now),
        )

    def _destinations(self, ticket: KvTicket) -> list[tuple[KvEndpoint, HeadRange]]:
        """The endpoints that take some of our heads, and which; together they take all."""
        ours = heads_of(self._geometry)
        usable = [endpoint for endpoint in ticket.endpoints if endpoint.transport == GRPC]
        if not usable:
            offered = ", ".join(endpoint.transport for endpoint in ticket.endpoints) or "nothing"
            raise refusal(f"no common transport for the push stream: ours is {GRPC}, theirs {offered}")
        overlaps = ((e, ours.overlap(HeadRange(e.head_start, e.head_count))) for e in usable)
        found = [(endpoint, heads) for endpoint, heads in overlaps if heads is not None]
        if not covered(ours, (heads for _, heads in found)):
            ranges = ", ".join(str(HeadRange(e.head_start, e.head_count)) for e in usable)
            raise refusal(f"the endpoints do not take all of heads {ours}; theirs take {ranges}")
        if not all(endpoint.worker_incarnation for endpoint, _ in found):
            raise refusal("the ticket names no incarnation of the decode worker")
        return found

    def _plan(self, limits: FrameLimits) -> SendPlan:
        """Frames of about `frame_bytes`, and never so large that two would not fit in the credit."""
        config = self._config
        per_layer = 2 * limits.head_count * limits.head_dim * DTYPE_BYTES[limits.dtype]
        bound = config.credit_bytes // 2
        tokens = min(config.frame_tokens, MAX_FRAME_TOKENS)
        while tokens > 1 and limits.frame_bound(FrameSpan(0, 1, 0, tokens)) > bound:
            tokens //= 2
        header = limits.frame_bound(FrameSpan(0, 1, 0, tokens)) - tokens * per_layer
        return SendPlan(
            key=limits.key,
            ref=limits.ref,
            num_layers=limits.num_layers,
            token_start=limits.token_start,
            token_end=limits.token_end,
            frame_tokens=tokens,
            frame_bytes=min(config.frame_bytes, bound - header),
            layer_token_bytes=per_layer,
            max_frame_retries=config.max_frame_retries + _OTHER_WAYS.get(config.transport, 1),
            timeout_s=config.send_timeout_s,
        )


def refusal(problem: str) -> TransferError:
    """A `TransferError` that trying again cannot cure."""
    error = TransferError(problem)
    error.retryable = False
    return error
