"""gRPC options of a push stream: a vanished peer is noticed in one to two seconds."""

from __future__ import annotations

from typing import Final

_KEEPALIVE: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
)
_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # A connection of its own: a dead one is not shared with, nor kept alive by, other channels of the process.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # Otherwise a second server on a taken port binds silently and steals connections.
    ("grpc.so_reuseport", 0),
)
"""For whoever makes the server that the receiver's servicer is added to."""
