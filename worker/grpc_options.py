"""gRPC channel and server options of the internal hops."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# By default nobody notices a host that has vanished; with these both ends do in 1 to 2 s. Server and client must
# agree: a client that pings faster than the server allows is sent away (GOAWAY too_many_pings).
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS = (*_KEEPALIVE, ("grpc.enable_retries", 0))

# Without so_reuseport=0 a second server on a taken port binds silently and steals connections.
SERVER_OPTIONS = (*_KEEPALIVE, ("grpc.so_reuseport", 0))
