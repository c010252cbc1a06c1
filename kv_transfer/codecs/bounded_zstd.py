"""Zstandard with a bound on what a payload may make the receiver allocate.

python-zstandard's (de)compressors must not be shared between threads, and to make one costs up to a third of what a
small section takes: each thread keeps its own. Its one-shot decompression sizes its output by the content size that
the payload claims, so that is compared with the announced one first.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from pdcore.errors import FrameError


class FrameCompressor:
    """Makes zstd frames of level 1, with the content size in the header and no checksum (the section has one).

    Args:
        parameters: of `zstandard.ZstdCompressionParameters`, where they differ from the level's.
    """

    def __init__(self, **parameters: int) -> None:
        self._parameters = parameters
        self._thread = threading.local()

    def compress(self, data: NDArray[np.uint8]) -> bytes:
        compressor: zstandard.ZstdCompressor | None = getattr(self._thread, "compressor", None)
        if compressor is None:
            compressor = self._thread.compressor = zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters.from_level(
                    1, write_content_size=True, **self._parameters
                )
            )
        return compressor.compress(data.data)


_thread = threading.local()


def decompress(payload: memoryview, size: int) -> NDArray[np.uint8]:
    """Decompress exactly one zstd frame that holds exactly `size` bytes.

    Raises:
        FrameError: the payload is not such a frame; nothing was allocated if it claims another size.
    """
    decompressor: zstandard.ZstdDecompressor | None = getattr(_thread, "decompressor", None)
    if decompressor is None:
        decompressor = _thread.decompressor = zstandard.ZstdDecompressor()
    try:
        claimed = zstandard.get_frame_parameters(payload).content_size
        if claimed != size:
            raise FrameError(f"a zstd payload claims {claimed} bytes, {size} were announced")
        data = decompressor.decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"a zstd payload does not decompress: {error}") from error
    if len(data) != size:
        raise FrameError(f"a zstd payload holds {len(data)} bytes, {size} were announced")
    return np.frombuffer(data, np.uint8)
