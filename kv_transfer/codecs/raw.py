"""`raw`: the section's bytes as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer
from pdcore.errors import FrameError


class RawCodec:
    """No compression."""

    name = "raw"
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def encode(self, values: NDArray[np.uint8], dtype: str) -> Sequence[Buffer] | None:
        return (values.data,)

    def decode(self, payload: memoryview, dtype: str, out: NDArray[np.uint8]) -> None:
        if len(payload) != out.size:
            raise FrameError(f"a raw payload of {len(payload)} bytes for a section of {out.size}")
        np.copyto(out, np.frombuffer(payload, np.uint8))
