"""Zstandard with a bound on what a payload may make the receiver allocate.

python-zstandard's (de)compressors must not be shared between threads, and its one-shot decompression sizes its
output by the content size that the payload claims. So contexts are made per call (a few microseconds against the
hundreds that a section takes) and the claimed size is compared with the announced one first.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from pdcore.errors import FrameError


def compress(data: NDArray[np.uint8], parameters: zstandard.ZstdCompressionParameters) -> bytes:
    """One zstd frame with its content size in the header and no checksum of its own (the section has one)."""
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data.data)


def decompress(payload: memoryview, size: int) -> NDArray[np.uint8]:
    """Decompress exactly one zstd frame that holds exactly `size` bytes.

    Raises:
        FrameError: the payload is not such a frame; nothing was allocated if it claims another size.
    """
    try:
        claimed = zstandard.get_frame_parameters(payload).content_size
        if claimed != size:
            raise FrameError(f"a zstd payload claims {claimed} bytes, {size} were announced")
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"a zstd payload does not decompress: {error}") from error
    if len(data) != size:
        raise FrameError(f"a zstd payload holds {len(data)} bytes, {size} were announced")
    return np.frombuffer(data, np.uint8)
