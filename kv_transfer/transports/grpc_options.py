"""gRPC options of a push stream's channel: a vanished peer is noticed in one to two seconds.

The server must permit pings as frequent as these; see `docs/kv-protocol.md`.
"""

from __future__ import annotations

from typing import Final

_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # A connection of its own: a dead one is not shared with, nor kept alive by, other channels of the process.
    ("grpc.use_local_subchannel_pool", 1),
)
