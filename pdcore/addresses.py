"""Addresses as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SCHEMES = {"https": True, "grpcs": True, "http": False, "grpc": False}
_GRPC_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "xds")  # left as they are


class Address(NamedTuple):
    """Where a router is. `encrypted`: what its scheme says; None without one."""

    target: str
    encrypted: bool | None = None


def grpc_address(address: str, *, tls: bool) -> str:
    """A ``host:port`` as clients take it: as it is in plain text, which gRPC's own tools know; else ``grpcs://``."""
    return f"grpcs://{address}" if tls else address


def http_address(address: str, *, tls: bool) -> str:
    """The same for HTTP: a URL."""
    return f"{'https' if tls else 'http'}://{address}"


def split_addresses(address: str | Sequence[str]) -> list[str]:
    """``host:port`` of each router, as it is written. Raises ValueError if there is none, or one is empty."""
    parts = address.split(",") if isinstance(address, str) else list(address)
    addresses = [part.strip() for part in parts]
    if not addresses or not all(addresses):
        raise ValueError(f"address: must be HOST:PORT, or several separated by commas, got {address!r}")
    return addresses


def parse_address(address: str) -> Address:
    """``host:port``, or ``https://host:port`` for one that is encrypted; gRPC's own schemes stay as they are.

    Raises ValueError for any other one.
    """
    scheme, separator, rest = address.partition("://")
    scheme, rest = scheme.lower(), rest.rstrip("/")
    if not separator or scheme in _GRPC_SCHEMES:
        return Address(address)
    if scheme not in _SCHEMES or not rest:
        raise ValueError(f"address: must be HOST:PORT or https://HOST:PORT, got {address!r}")
    return Address(rest, _SCHEMES[scheme])
