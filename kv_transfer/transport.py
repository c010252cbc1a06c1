"""The faces between KV transfer and its surroundings, and between its mechanism and a transport.

KV transfer does not know the engine: it reads and writes blocks through `KvStore`, and tells the decode worker
what became of a ticket through `TicketHost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import Hello, LaneClose, LaneFrame, LaneOpen, PushMessage, PushReply
from pdcore.errors import TransferError
from pdcore.types import KvGeometry, KvTransferStats, RequestKey


class KvStore(Protocol):
    """A paged cache in its backend's own layout, seen through the canonical one: (layer, K or V, token, head, dim).

    Both calls may be made from several threads at once (gathers on any blocks, a scatter on blocks that nobody else
    touches), and release the GIL for their bulk.
    """

    geometry: KvGeometry

    def gather(
        self, layer_start: int, layer_count: int, block_ids: Sequence[int], token_start: int, token_count: int
    ) -> torch.Tensor:
        """Copy K and V out of the cache.

        Args:
            block_ids: the sequence's whole block table; token t is in ``block_ids[t // block_size]``.
            token_start, token_count: range of tokens, counted from the start of the sequence.

        Returns:
            Contiguous CPU tensor [layer_count, 2, token_count, num_kv_heads, head_dim] in the cache's dtype.
        """
        ...

    def scatter(
        self, layer_start: int, block_ids: Sequence[int], token_start: int, values: torch.Tensor, head_start: int = 0
    ) -> None:
        """Copy K and V into the cache; the inverse of `gather`, `values` as it returns them, or fewer heads of it.

        Args:
            head_start: where the heads of `values` begin, counted from this cache's first.
        """
        ...


class TicketHost(Protocol):
    """The decode worker, as the receiver sees it. Called from the receiver's threads, holding none of its locks."""

    def on_commit(self, key: RequestKey, first_tokens: tuple[int, ...], stats: KvTransferStats) -> bool:
        """Every frame is in place and the manifest is verified: take the blocks as sequences that go on from
        `first_tokens`, one for each sample of the request. Returns False if the request is gone (aborted meanwhile);
        the receiver then releases."""
        ...

    def on_release(self, key: RequestKey, reason: str, failed: bool) -> None:
        """The ticket ended without commit and no scatter into its blocks is in flight: they may be freed. Called
        exactly once for every granted ticket that is not committed. `failed` is False if the owner released it, or if
        the sender gave up: the sender's worker reports that."""
        ...


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """How a send ended. After this the sender reads no block of the request any more.

    `error` is None if the receiver committed. `wire_bytes`: frame bytes sent, repeats included.
    """

    key: RequestKey
    error: TransferError | None
    frames: int
    wire_bytes: int
    seconds: float


class PushLink(Protocol):
    """The sender's end of one stream to a receiver. Made by a transport; it speaks as soon as it is made.

    The `post` methods may be called from any thread and never block: what may wait here is bounded by the credit that
    the sender spends before it posts a frame. After `cancel` or `finish`, or once the stream is gone, they do
    nothing.
    """

    def post_frame(self, ref: TicketRef, frame_index: int, attempt: int, frame: bytes) -> None:
        """Send a frame, in pieces if it is larger than a message."""
        ...

    def post_manifest(self, manifest: Manifest, on_sent: Callable[[], None]) -> None:
        """Send a manifest behind what was posted before it. `on_sent` is called when the transport has taken it."""
        ...

    def post_abort(self, ref: TicketRef, reason: str) -> None:
        """Tell the receiver that a ticket will not be filled."""
        ...

    def post_lane(self, message: LaneOpen | LaneFrame | LaneClose) -> None:
        """Say something about a lane beside the stream."""
        ...

    def cancel(self) -> None:
        """End the stream now; returns at once. `LinkListener.on_closed` follows."""
        ...

    def finish(self) -> None:
        """End the stream behind what was posted; returns at once."""
        ...

    def close(self, timeout_s: float) -> None:
        """`finish`, and wait for the end at most this long; a stream that takes longer than half of it is cut off."""
        ...


class LinkListener(Protocol):
    """Who hears from a `PushLink`. Called from the link's own thread."""

    def on_reply(self, reply: PushReply) -> None:
        """The receiver said something."""
        ...

    def on_closed(self, reason: str, refused: bool) -> None:
        """The stream is gone; called once, last. `refused`: the receiver will not have it, trying again is no use."""
        ...


class OpenLink(Protocol):
    """How a transport makes a `PushLink`."""

    def __call__(
        self, address: str, hello: Hello, listener: LinkListener, *, message_bytes: int, cores: tuple[int, ...] = ()
    ) -> PushLink:
        """Open a stream to a receiver; returns at once.

        Args:
            address: ``host:port`` of the receiver's worker. hello: sent first.
            listener: hears replies and the end.
            message_bytes: payload of one message, about. cores: affinity of the link's own thread; empty: any.
        """
        ...


class PushStream(Protocol):
    """The receiver's end of one stream from a sender."""

    def reply(self, reply: PushReply) -> None:
        """Say something to the sender. Never blocks; does nothing once the stream is gone."""
        ...

    def refuse(self, reason: str) -> None:
        """End the stream: the two ends do not fit together, or the sender broke the protocol. Returns at once."""
        ...

    def end(self) -> None:
        """End the stream in order, behind the replies said before. Returns at once."""
        ...


class StreamListener(Protocol):
    """Who hears from a `PushStream`. Called from the stream's own thread."""

    def on_message(self, message: PushMessage) -> None:
        """The sender said something."""
        ...

    def on_closed(self, reason: str) -> None:
        """The stream is gone; called once, last."""
        ...
