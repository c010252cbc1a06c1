"""Addresses as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def split_addresses(address: str | Sequence[str]) -> list[str]:
    """``host:port`` of each router. Raises ValueError if there is none, or one is empty."""
    parts = address.split(",") if isinstance(address, str) else list(address)
    addresses = [part.strip() for part in parts]
    if not addresses or not all(addresses):
        raise ValueError(f"address: must be HOST:PORT, or several separated by commas, got {address!r}")
    return addresses
