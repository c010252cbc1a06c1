"""The C functions as Python sees them: on numpy arrays, without the GIL, at the best level that the CPU has.

`native_kernels` is what codecs ask; None means that they compute with numpy, to the same bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdcore.native_build import NativeUnavailable, open_library

logger = logging.getLogger(__name__)

LEVELS: Final = ("portable", "avx2", "avx512")
"""Dispatch levels in rising order; a level's index is what the C functions know it by."""

Bytes = NDArray[np.uint8]


class NativeKernels:
    """The library's functions at one dispatch level. Arrays are uint8, flat, contiguous, and do not overlap.

    Attributes:
        level: one of `LEVELS`. crc32_pays: whether `crc32` is faster than zlib's.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        self.crc32_pays = level != "portable"
        number = LEVELS.index(level)
        self._crc32 = functools.partial(_function(library, "pdkv_crc32", "iupz", ctypes.c_uint32), number)
        self._split = functools.partial(_function(library, "pdkv_split", "ipzpp", None), number)
        self._join = functools.partial(_function(library, "pdkv_join", "ippzp", None), number)
        self._bexp3_encode = functools.partial(
            _function(library, "pdkv_bexp3_encode", "ipzzzzpz", ctypes.c_size_t), number
        )
        self._bexp3_decode = functools.partial(
            _function(library, "pdkv_bexp3_decode", "ipzzzzzp", ctypes.c_int), number
        )

    def crc32(self, data: Bytes, value: int) -> int:
        """As zlib's, continuing from `value`."""
        return int(self._crc32(value, data.ctypes.data, data.size))

    def split(self, values: Bytes, high: Bytes, low: Bytes) -> None:
        """16-bit elements to bits 14..7 of each in `high` and bits 15, 6..0 in `low`. values [2 n], others [n]."""
        assert values.size == 2 * high.size == 2 * low.size
        self._split(values.ctypes.data, high.size, high.ctypes.data, low.ctypes.data)

    def join(self, high: Bytes, low: Bytes, values: Bytes) -> None:
        """The inverse of `split`."""
        assert values.size == 2 * high.size == 2 * low.size
        self._join(high.ctypes.data, low.ctypes.data, high.size, values.ctypes.data)

    def bexp3_encode(self, values: Bytes, shape: tuple[int, int, int], group: int, payload: Bytes) -> int:
        """Write the bexp3 payload of `values`, bfloat16 [layers, tokens, channels] = `shape`, and return its size.

        Args:
            group: tokens of a tile.
            payload: has room for the fixed parts, an escape for every element, and 4 bytes more.
        """
        assert values.size == 2 * math.prod(shape)
        size = int(self._bexp3_encode(values.ctypes.data, *shape, group, payload.ctypes.data, payload.size))
        assert size, (values.size, payload.size)
        return size

    def bexp3_decode(self, payload: Bytes, shape: tuple[int, int, int], group: int, out: Bytes) -> int:
        """Fill `out`, bfloat16 [layers, tokens, channels] = `shape`, from a payload, which may be any bytes.

        Returns:
            0, or what is wrong (then `out` holds anything): 1 the length, 2 the escapes, 3 the padding.
        """
        assert out.size == 2 * math.prod(shape)
        return int(self._bexp3_decode(payload.ctypes.data, payload.size, *shape, group, out.ctypes.data))


def available_levels() -> tuple[str, ...]:
    """The dispatch levels of this CPU, in rising order.

    Raises:
        NativeUnavailable: there is no library.
    """
    supported = _function(_library(), "pdkv_levels", "", ctypes.c_uint32)()
    return tuple(level for number, level in enumerate(LEVELS) if supported >> number & 1)


def load_kernels(level: str | None = None) -> NativeKernels:
    """The kernels at a level, by default the best one; builds the library if it was never built.

    Raises:
        NativeUnavailable: there is no library, or this CPU does not have that level.
    """
    levels = available_levels()
    if level is not None and level not in levels:
        raise NativeUnavailable(f"this CPU has {', '.join(levels)}, not {level}")
    return NativeKernels(_library(), level or levels[-1])


def native_kernels() -> NativeKernels | None:
    """What this process computes with; None if native code is switched off or cannot be had.

    The first call builds the library if need be (seconds; other threads wait for it), and logs it if that fails.
    """
    return _process.kernels() if _process.enabled else None


def native_status() -> str:
    """For people: the dispatch level in use, or ``off`` and why, in one line. Builds the library if need be."""
    if not _process.enabled:
        return "off: switched off"
    kernels = _process.kernels()
    return kernels.level if kernels is not None else f"off: {_process.problem}"


def set_native(enabled: bool) -> None:
    """Switch native code of this process off, or on again. It starts switched on."""
    _process.enabled = enabled


class _Process:
    """The kernels that the codecs of this process share, loaded at the first question."""

    def __init__(self) -> None:
        self.enabled = True
        self.problem = ""
        self._lock = threading.Lock()
        self._loaded = False
        self._kernels: NativeKernels | None = None

    def kernels(self) -> NativeKernels | None:
        if self._loaded:
            return self._kernels
        with self._lock:
            if not self._loaded:
                try:
                    self._kernels = load_kernels()
                except NativeUnavailable as error:
                    self.problem = str(error).splitlines()[0]
                    logger.warning("KV codecs run without native code, several times slower: %s", error)
                self._loaded = True
        return self._kernels


_process = _Process()


@functools.cache
def _library() -> ctypes.CDLL:
    return open_library("pdkv", Path(__file__).parent)


_ARGUMENTS: Final[dict[str, Any]] = {
    "i": ctypes.c_int,
    "u": ctypes.c_uint32,
    "p": ctypes.c_void_p,
    "z": ctypes.c_size_t,
}


def _function(library: ctypes.CDLL, name: str, arguments: str, result: Any) -> Callable[..., Any]:
    function = library[name]
    function.argtypes = [_ARGUMENTS[argument] for argument in arguments]
    function.restype = result
    return function
