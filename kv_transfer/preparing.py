"""From a ticket to a send: what can be refused at once is refused here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.codecs.registry import CodecRegistry
from kv_transfer.frames import MAX_FRAME_TOKENS, FrameLimits
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.negotiation import AUTO, GRPC
from kv_transfer.outbound import Peer, Send
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
    ) -> Send:
        """A send that fills `ticket`, made at clock reading `now`; arguments and errors as for `KvSender.open`."""
        geometry = self._geometry
        if not ticket.worker_incarnation:
            raise refusal("the ticket names no incarnation of the decode worker")
        if not 0 <= ticket.prefix_tokens < ticket.num_tokens <= len(block_ids) * geometry.block_size:
            raise refusal(
                f"a ticket for tokens [{ticket.prefix_tokens}, {ticket.num_tokens}) and {len(block_ids)} blocks of "
                f"{geometry.block_size} tokens"
            )
        endpoint = self._endpoint(ticket)
        self._codecs.usable(ticket.codecs, geometry.dtype)
        limits = FrameLimits.for_ticket(
            ref=TicketRef(ticket.ticket_id, ticket.generation),
            key=key,
            geometry=geometry,
            token_start=ticket.prefix_tokens,
            token_end=ticket.num_tokens,
            codecs=ticket.codecs,
        )
        return Send(
            key=key,
            session=SendSession(self._plan(limits)),
            limits=limits,
            asked=codec or self._config.codec,
            block_ids=tuple(block_ids),
            on_done=on_done,
            peer=Peer(endpoint.address, ticket.worker_incarnation, now, now),
            opened_at=now,
        )

    def _endpoint(self, ticket: KvTicket) -> KvEndpoint:
        heads = self._geometry.num_kv_heads
        usable = [endpoint for endpoint in ticket.endpoints if endpoint.transport == GRPC]
        if not usable:
            offered = ", ".join(endpoint.transport for endpoint in ticket.endpoints) or "nothing"
            raise refusal(f"no common transport for the push stream: ours is {GRPC}, theirs {offered}")
        whole = [endpoint for endpoint in usable if (endpoint.head_start, endpoint.head_count) == (0, heads)]
        if not whole:
            ranges = ", ".join(f"[{e.head_start}, {e.head_start + e.head_count})" for e in usable)
            raise refusal(f"no endpoint takes heads [0, {heads}); theirs take {ranges}")
        return whole[0]

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
