"""Addresses as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_PORT = 50051
"""gRPC's port of a router where an address names none."""

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
    """``host:port`` of each router, with its scheme if it has one; `DEFAULT_PORT` where none is written.

    Raises ValueError if there is no router, or one of them is no address.
    """
    parts = address.split(",") if isinstance(address, str) else list(address)
    addresses = [part.strip() for part in parts]
    if not addresses or not all(addresses):
        raise ValueError(f"address: must be HOST:PORT, or several separated by commas, got {address!r}")
    return [_with_port(each) for each in addresses]


def _with_port(address: str) -> str:
    """gRPC itself would take 443 where there is none, in plain text too."""
    scheme, separator, rest = address.rpartition("://")
    if (scheme or rest.partition(":")[0]).lower() in _GRPC_SCHEMES:
        return address
    name, equals, _ = address.partition("=")
    if equals:
        raise ValueError(f"address: must be HOST:PORT, without {name}= before it, got {address!r}")
    rest = rest.rstrip("/")
    host, colon, port = rest.rpartition(":")
    try:
        (host or rest).encode("idna")  # as whoever looks it up does: a part of a name has at most 63 characters
    except UnicodeError:
        raise ValueError(f"address: must be HOST:PORT, with a host's name as HOST, got {address[:100]!r}") from None
    if not colon or rest.endswith("]"):
        return f"{scheme}{separator}{rest}:{DEFAULT_PORT}"
    if ":" in host and "[" not in host:  # IPv6 as it stands
        return f"{scheme}{separator}[{rest}]:{DEFAULT_PORT}"
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"address: must be HOST:PORT, with a number below 65536 as PORT, got {address!r}")
    return address


def parse_address(address: str) -> Address:
    """``host:port``, or ``https://host:port`` for one that is encrypted; gRPC's own schemes stay as they are.

    Of what `split_addresses` returns. Raises ValueError for any other one.
    """
    scheme, separator, rest = address.partition("://")
    scheme, rest = scheme.lower(), rest.rstrip("/")
    if not separator or scheme in _GRPC_SCHEMES:
        return Address(address)
    if scheme not in _SCHEMES or not rest:
        raise ValueError(f"address: must be HOST:PORT or https://HOST:PORT, got {address!r}")
    return Address(rest, _SCHEMES[scheme])
