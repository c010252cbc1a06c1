"""The codecs that a worker has, and the choice of one for a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kv_transfer.codecs.base import Codec
from kv_transfer.codecs.bexp3 import Bexp3Codec
from kv_transfer.codecs.bexp_zstd import BexpZstdCodec
from kv_transfer.codecs.calibration import load_calibration
from kv_transfer.codecs.fp8 import Fp8Codec
from kv_transfer.codecs.grouped import GroupedCodec
from kv_transfer.codecs.q8 import Q8Codec
from kv_transfer.codecs.raw import RawCodec
from kv_transfer.codecs.tc4 import Tc4Codec
from kv_transfer.codecs.zstd import ZstdCodec
from kv_transfer.frames import wire_name
from pdcore.errors import TransferError
from pdcore.types import KvGeometry


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

    def fitting(self, dtype: str) -> tuple[str, ...]:
        """Wire names of what can pack `dtype`."""
        return tuple(name for name, codec in self._by_wire_name.items() if dtype in codec.dtypes)

    def accepted(self, asked: str, dtypes: Iterable[str]) -> tuple[str, ...]:
        """Wire names of what a ticket for KV of one of `dtypes` accepts: whatever is lossless, and what was asked for
        (a plain name, or ``auto``), which comes first."""
        taken = set(dtypes)
        fitting = [(name, codec) for name, codec in self._by_wire_name.items() if taken & set(codec.dtypes)]
        wanted = [(name, codec.name != asked) for name, codec in fitting if codec.lossless or codec.name == asked]
        return tuple(name for name, _ in sorted(wanted, key=lambda item: item[1]))

    def usable(self, accepted: Sequence[str], dtype: str) -> dict[str, Codec]:
        """What can pack `dtype` and is accepted (wire names), by plain name: of a calibrated codec the first.

        Raises:
            TransferError: nothing lossless is; names both sides. Not retryable.
        """
        usable: dict[str, Codec] = {}
        for name, codec in self._by_wire_name.items():
            if name in accepted and dtype in codec.dtypes:
                usable.setdefault(codec.name, codec)
        if any(codec.lossless for codec in usable.values()):
            return usable
        ours, theirs = ", ".join(self._by_wire_name), ", ".join(accepted)
        error = TransferError(f"no common lossless codec for {dtype}: ours are {ours}, theirs {theirs}")
        error.retryable = False
        raise error


STANDARD: Final = CodecRegistry(
    (
        BexpZstdCodec(),
        Bexp3Codec(),
        ZstdCodec(),
        RawCodec(),
        Q8Codec(),
        Q8Codec(zstd=True),
        GroupedCodec("k6v4", key_bits=6, value_bits=4),
        GroupedCodec("k4v4", key_bits=4, value_bits=4),
        Fp8Codec(),
    )
)
"""What needs no calibration."""


def worker_codecs(calibration: str, geometry: KvGeometry) -> CodecRegistry:
    """The codecs of a worker whose cache has this geometry.

    Args:
        calibration: file with the calibration of `tc4`; empty leaves that codec out.

    Raises:
        ConfigError: the file is unusable, or belongs to another model.
    """
    if not calibration:
        return STANDARD
    return CodecRegistry((*STANDARD, Tc4Codec(load_calibration(Path(calibration), geometry))))
