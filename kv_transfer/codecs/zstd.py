"""`zstd`: plain Zstandard, level 1, over the section's bytes. For fp32 caches, where little more is to be had."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape
from kv_transfer.codecs.bounded_zstd import FrameCompressor, decompress
from kv_transfer.frames import NO_TAG

_LEVEL_1 = FrameCompressor()


class ZstdCodec:
    """Plain zstd, level 1."""

    name = "zstd"
    version = 1
    lossless = True
    calibration = NO_TAG
    parameters = NO_TAG
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        payload = _LEVEL_1.compress(values)
        return (payload,) if len(payload) < values.size else None

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        np.copyto(out, decompress(payload, out.size))
