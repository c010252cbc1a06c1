"""CRC-32 as zlib has it, which is the checksum of the KV protocol."""

from __future__ import annotations

from zlib import crc32

__all__ = ["crc32"]
