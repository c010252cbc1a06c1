"""What two ends of a push stream ask of each other before the first frame. Pure."""

from __future__ import annotations

from kv_transfer.messages import Hello, Welcome
from kv_transfer.negotiation import GRPC, Negotiation, Offer
from pdcore.errors import HandshakeRefused
from pdcore.types import PROTOCOL_VERSION, KvGeometry

_SHARED = ("model_digest", "num_layers", "num_kv_heads", "head_dim", "dtype")


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


def check_hello(theirs: Hello, incarnation: str, geometry: KvGeometry) -> None:
    """Raises `HandshakeRefused`, naming both values, if the receiver cannot work with this sender."""
    if not theirs.protocol_min <= PROTOCOL_VERSION <= theirs.protocol_max:
        raise HandshakeRefused("KV protocol", PROTOCOL_VERSION, f"{theirs.protocol_min} to {theirs.protocol_max}")
    if theirs.receiver_incarnation != incarnation:
        raise HandshakeRefused("incarnation of the decode worker", incarnation, theirs.receiver_incarnation)
    _check_geometry(geometry, theirs.geometry)


def check_welcome(theirs: Welcome, receiver_incarnation: str, geometry: KvGeometry, offered: tuple[str, ...]) -> None:
    """Raises `HandshakeRefused`, naming both values, if the sender cannot work with this receiver.

    `offered`: the transports of the sender's offer.
    """
    if theirs.protocol != PROTOCOL_VERSION:
        raise HandshakeRefused("KV protocol", PROTOCOL_VERSION, theirs.protocol)
    if theirs.worker_incarnation != receiver_incarnation:
        raise HandshakeRefused("incarnation of the decode worker", receiver_incarnation, theirs.worker_incarnation)
    _check_geometry(geometry, theirs.geometry)
    usable = theirs.negotiation.transports
    if usable[-1:] != (GRPC,) or not set(usable) <= {GRPC, *offered}:
        raise HandshakeRefused("transports", ", ".join(offered), ", ".join(usable))


def _check_geometry(ours: KvGeometry, theirs: KvGeometry) -> None:
    for name in _SHARED:
        if getattr(ours, name) != getattr(theirs, name):
            raise HandshakeRefused(f"KV geometry: {name}", getattr(ours, name), getattr(theirs, name))
