"""Codecs by name, and the choice of one for a transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kv_transfer.codecs.base import Codec
from kv_transfer.codecs.bexp_zstd import BexpZstdCodec
from kv_transfer.codecs.raw import RawCodec
from kv_transfer.codecs.zstd import ZstdCodec
from pdcore.errors import TransferError

CODECS: Final[Mapping[str, Codec]] = MappingProxyType(
    {codec.name: codec for codec in (BexpZstdCodec(), ZstdCodec(), RawCodec())}
)


def accepted_codecs(preferred: str, dtype: str) -> tuple[str, ...]:
    """Names of the codecs that a receiver with a cache of type `dtype` offers: `preferred` first if it fits."""
    names = [name for name, codec in CODECS.items() if dtype in codec.dtypes]
    return tuple(sorted(names, key=lambda name: name != preferred))


def choose_codec(preferred: str, accepted: Sequence[str], dtype: str) -> Codec:
    """The codec of a transfer.

    `preferred` if it can encode `dtype` and is accepted. A preferred codec that cannot encode `dtype` asked for
    compression all the same, so plain zstd takes its place; raw is the last resort.

    Raises:
        TransferError: nothing that is accepted is known here; names both sides. Not retryable.
    """
    for name in (preferred, *(("zstd",) if preferred != "raw" else ()), "raw"):
        codec = CODECS.get(name)
        if codec is not None and name in accepted and dtype in codec.dtypes:
            return codec
    error = TransferError(f"no common codec for {dtype}: ours are {', '.join(CODECS)}, theirs {', '.join(accepted)}")
    error.retryable = False
    raise error
