"""What two ends of a push stream ask of each other before the first frame. Pure."""

from __future__ import annotations

from kv_transfer.head_ranges import HeadRange, heads_of
from kv_transfer.messages import Hello, Welcome
from kv_transfer.negotiation import GRPC, Negotiation, Offer
from pdcore.config import convertible
from pdcore.errors import HandshakeRefused
from pdcore.types import PROTOCOL_VERSION, KvGeometry

_SHARED = ("model_digest", "num_layers", "head_dim")


def hello(worker_id: str, incarnation: str, receiver_incarnation: str, geometry: KvGeometry, offer: Offer) -> Hello:
    """The sender's first message, to the receiver whose tickets name `receiver_incarnation`."""
    return Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, worker_id, incarnation, receiver_incarnation, geometry, offer)


def welcome(
    incarnation: str,
    geometry: KvGeometry,
    codecs: tuple[str, ...],
    *,
    credit_bytes: int,
    negotiation: Negotiation,
    decode_rates: tuple[tuple[str, float], ...] = (),
) -> Welcome:
    """The receiver's first message."""
    return Welcome(PROTOCOL_VERSION, incarnation, geometry, codecs, credit_bytes, negotiation, decode_rates)


def check_hello(theirs: Hello, incarnation: str, geometry: KvGeometry, kv_conversion: str) -> HeadRange:
    """The heads that this sender can bring: those that both ends have.

    Args:
        kv_conversion: see `TransferConfig`.

    Raises:
        HandshakeRefused: the receiver cannot work with this sender; names both values.
    """
    if not theirs.protocol_min <= PROTOCOL_VERSION <= theirs.protocol_max:
        raise HandshakeRefused("KV protocol", PROTOCOL_VERSION, f"{theirs.protocol_min} to {theirs.protocol_max}")
    if theirs.receiver_incarnation != incarnation:
        raise HandshakeRefused("incarnation of the decode worker", incarnation, theirs.receiver_incarnation)
    heads = _common_heads(geometry, theirs.geometry)
    if not convertible(theirs.geometry.dtype, geometry.dtype, kv_conversion):
        raise HandshakeRefused("KV dtype, with transfer.kv_conversion exact", geometry.dtype, theirs.geometry.dtype)
    return heads


def check_welcome(theirs: Welcome, receiver_incarnation: str, geometry: KvGeometry, offered: tuple[str, ...]) -> None:
    """Raises `HandshakeRefused`, naming both values, if the sender cannot work with this receiver.

    `offered`: the transports of the sender's offer.
    """
    if theirs.protocol != PROTOCOL_VERSION:
        raise HandshakeRefused("KV protocol", PROTOCOL_VERSION, theirs.protocol)
    if theirs.worker_incarnation != receiver_incarnation:
        raise HandshakeRefused("incarnation of the decode worker", receiver_incarnation, theirs.worker_incarnation)
    _common_heads(geometry, theirs.geometry)
    usable = theirs.negotiation.transports
    if usable[-1:] != (GRPC,) or not set(usable) <= {GRPC, *offered}:
        raise HandshakeRefused("transports", ", ".join(offered), ", ".join(usable))


def _common_heads(ours: KvGeometry, theirs: KvGeometry) -> HeadRange:
    for name in _SHARED:
        if getattr(ours, name) != getattr(theirs, name):
            raise HandshakeRefused(f"KV geometry: {name}", getattr(ours, name), getattr(theirs, name))
    heads = heads_of(ours).overlap(heads_of(theirs))
    if heads is None:
        raise HandshakeRefused("KV geometry: heads", str(heads_of(ours)), str(heads_of(theirs)))
    return heads
