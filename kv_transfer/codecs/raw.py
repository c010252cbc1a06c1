"""`raw`: the section's bytes as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape
from kv_transfer.frames import NO_TAG
from pdcore.errors import FrameError


class RawCodec:
    """No compression."""

    name = "raw"
    version = 1
    lossless = True
    calibration = NO_TAG
    parameters = NO_TAG
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        return (values.data,)

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        if len(payload) != out.size:
            raise FrameError(f"a raw payload of {len(payload)} bytes for a section of {out.size}")
        np.copyto(out, np.frombuffer(payload, np.uint8))
