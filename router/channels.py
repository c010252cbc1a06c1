"""gRPC options of the router's hops."""

from __future__ import annotations

from collections.abc import Sequence

from pdcore.config import RouterConfig

Options = Sequence[tuple[str, int]]

# Inside the cluster a host that vanished must be noticed in one to two seconds; by default nobody would.
_INTERNAL_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
)

# Clients on the outside ping as they like, or not at all for days; they are never sent away for it. One that vanished
# is noticed by its silence. The time-out of keepalive alone is not enough: whatever comes while a ping is on its way
# stops it, and then only the one of pings, a minute by default, sees that no answer comes.
_PUBLIC_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
    ("grpc.http2.max_ping_strikes", 0),
)

# Of a connection that has still to become one: gRPC's own two minutes, times those who connect and say nothing, would
# keep all others out.
_HANDSHAKE = (("grpc.server_handshake_timeout_ms", 10_000),)


def _message_limits(max_message_bytes: int) -> Options:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )


def internal_channel_options(max_message_bytes: int) -> Options:
    """Router to worker or controller. Reconnecting is done above the channel, so its own backoff is kept short."""
    return (
        *_INTERNAL_KEEPALIVE,
        *_message_limits(max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )


def public_server_options(max_message_bytes: int) -> Options:
    """The public port. Without so_reuseport=0 a second router on a taken port would bind silently."""
    return (*_PUBLIC_KEEPALIVE, *_HANDSHAKE, *_message_limits(max_message_bytes), ("grpc.so_reuseport", 0))


def connection_limits(config: RouterConfig) -> Options:
    """What one connection to the public port may ask for, and how many there may be.

    gRPC has two limits for headers, and takes what is between them at random: here they are one.
    """
    return (
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
        ("grpc.max_concurrent_streams", config.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
    )


def client_options(max_message_bytes: int, read_ahead_bytes: int) -> Options:
    """A client of the public port.

    Args:
        read_ahead_bytes: what the server may send of one stream before this client reads it. gRPC's own choice grows
            to megabytes, which would hide a slow reader from the router.
    """
    return (
        *_message_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", read_ahead_bytes),
    )
