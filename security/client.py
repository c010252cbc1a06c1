"""Channels of the clients of the public end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pdcore.addresses import parse_address, split_addresses
from pdcore.security import ClientTls
from security.credentials import client_credentials

ChannelOptions = Sequence[tuple[str, Any]]

# A router that restarts is to be found again at once; gRPC's own waits grow to two minutes. Its time-out of one
# attempt to connect (grpc.min_reconnect_backoff_ms, 20 s) stays as it is: a handshake over a slow link needs some.
_RECONNECT: ChannelOptions = (("grpc.initial_reconnect_backoff_ms", 250), ("grpc.max_reconnect_backoff_ms", 1000))


def client_channels(
    address: str | Sequence[str], tls: ClientTls | None, options: ChannelOptions
) -> list[grpc.Channel]:
    """A channel to each router. See `router.client.Client` for the arguments.

    One whose router has gone tries to connect again about once a second.

    Raises:
        ValueError: an address is none. ConfigError: a file of `tls` is not right.
    """
    return _channels(address, tls, options, grpc.insecure_channel, grpc.secure_channel)


def aio_client_channels(
    address: str | Sequence[str], tls: ClientTls | None, options: ChannelOptions
) -> list[grpc.aio.Channel]:
    """`client_channels` for asyncio."""
    return _channels(address, tls, options, grpc.aio.insecure_channel, grpc.aio.secure_channel)


def secured(address: str, tls: ClientTls | None) -> bool:
    """Whether calls to an address are encrypted. Raises ValueError for one that is none, or is not to be."""
    target = parse_address(address)
    if tls is not None and target.encrypted is False:
        raise ValueError(f"address: with certificates it must be HOST:PORT or https://HOST:PORT, not {address}")
    return tls is not None if target.encrypted is None else target.encrypted


def _channels(
    address: str | Sequence[str],
    tls: ClientTls | None,
    options: ChannelOptions,
    insecure: Callable[..., Any],
    secure: Callable[..., Any],
) -> list[Any]:
    parts = split_addresses(address)
    options = (*_RECONNECT, *options)
    encrypted = [secured(part, tls) for part in parts]
    credentials, names = client_credentials(tls or ClientTls()) if any(encrypted) else (None, ())
    return [
        secure(parse_address(part).target, credentials, options=(*options, *names))
        if tight
        else insecure(parse_address(part).target, options=options)
        for part, tight in zip(parts, encrypted, strict=True)
    ]
