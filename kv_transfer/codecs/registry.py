"""The codecs that a worker has, and the choice of one for a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kv_transfer.codecs.base import Codec
from kv_transfer.codecs.bexp_zstd import BexpZstdCodec
from kv_transfer.codecs.raw import RawCodec
from kv_transfer.codecs.zstd import ZstdCodec
from kv_transfer.frames import wire_name
from pdcore.errors import TransferError


class CodecRegistry:
    """Codecs by the names that tickets and welcomes use. Immutable.

    A calibrated codec is in a registry once for each calibration that the worker has; its plain name stands for the
    first of them.
    """

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._by_wire_name: dict[str, Codec] = {}
        self._by_name: dict[str, Codec] = {}
        for codec in codecs:
            self._by_wire_name[wire_name(codec.name, codec.calibration)] = codec
            self._by_name.setdefault(codec.name, codec)

    def __iter__(self) -> Iterator[Codec]:
        return iter(self._by_wire_name.values())

    def __getitem__(self, name: str) -> Codec:
        """A codec by its plain name. Raises KeyError."""
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Plain names."""
        return tuple(self._by_name)

    def find(self, name: str, calibration: bytes) -> Codec | None:
        """The codec of a frame, by its plain name and calibration."""
        return self._by_wire_name.get(wire_name(name, calibration))

    def accepted(self, preferred: str, dtype: str) -> tuple[str, ...]:
        """Wire names of what a receiver with a cache of type `dtype` offers: `preferred` first if it fits."""
        fitting = [(name, codec) for name, codec in self._by_wire_name.items() if dtype in codec.dtypes]
        return tuple(name for name, codec in sorted(fitting, key=lambda item: item[1].name != preferred))

    def choose(self, preferred: str, accepted: Sequence[str], dtype: str) -> Codec:
        """The codec of a transfer.

        `preferred` (a plain name) if it can encode `dtype` and is accepted. A preferred codec that cannot be used
        asked for compression all the same, so the best lossless one takes its place; raw is the last resort.

        Raises:
            TransferError: nothing that is accepted is known here; names both sides. Not retryable.
        """
        usable = [codec for name, codec in self._by_wire_name.items() if name in accepted and dtype in codec.dtypes]
        for codec in usable:
            if codec.name == preferred:
                return codec
        fallbacks = ("bexp-zstd", "zstd", "raw") if preferred != "raw" else ("raw",)
        for name in fallbacks:
            for codec in usable:
                if codec.name == name:
                    return codec
        ours, theirs = ", ".join(self._by_wire_name), ", ".join(accepted)
        error = TransferError(f"no common codec for {dtype}: ours are {ours}, theirs {theirs}")
        error.retryable = False
        raise error


STANDARD: Final = CodecRegistry((BexpZstdCodec(), ZstdCodec(), RawCodec()))
"""What needs no calibration."""
