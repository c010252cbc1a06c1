"""The engine's C library: built on first use, opened once, on torch's own threads."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from pathlib import Path
from typing import Any

from pdcore.native_build import NativeUnavailable, open_library

logger = logging.getLogger(__name__)


@functools.cache
def engine_library() -> ctypes.CDLL | None:
    """Built on first use, see `pdcore.native_build`; None, and a word in the log, if that cannot be."""
    try:
        library = open_library("pdmm", Path(__file__).parent)
    except NativeUnavailable as error:
        logger.warning("the engine runs without native code, decoding up to half as fast: %s", error)
        return None
    library.pdmm_supported.restype = ctypes.c_int
    if not library.pdmm_supported():
        logger.info("this CPU has no AVX2: the engine runs without native code")
        return None
    library.pdmm_packed_bytes.restype = ctypes.c_size_t
    _declare(library.pdmm_packed_bytes, "zz")
    _declare(library.pdmm_pack, "pzzp")
    _declare(library.pdmm_linear, "pzzpzzpppu")
    library.pdmm_attend.restype = ctypes.c_int
    _declare(library.pdmm_attend, "pu")
    library.pdmm_prefill.restype = ctypes.c_int
    _declare(library.pdmm_prefill, "pu")
    _declare(library.pdmm_rms_norm, "pzzzpfp")
    _declare(library.pdmm_threads, "ppp")
    library.pdmm_linear.restype = ctypes.c_int
    _share_threads(library)
    return library


def _share_threads(library: ctypes.CDLL) -> None:
    """Let the kernel run on torch's own threads: a second pool would fight with them for the cores."""
    loaded = set(re.findall(r"\S*/lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*", Path("/proc/self/maps").read_text()))
    torch_s = sorted(path for path in loaded if "torch" in path) or sorted(loaded)
    if not torch_s:
        logger.info("torch's OpenMP runtime was not found: native code runs on one thread")
        return
    runtime = ctypes.CDLL(torch_s[0])
    functions = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    library.pdmm_threads(*(ctypes.cast(runtime[name], ctypes.c_void_p) for name in functions))


def _declare(function: Any, arguments: str) -> None:
    kinds = {"p": ctypes.c_void_p, "z": ctypes.c_size_t, "u": ctypes.c_uint, "f": ctypes.c_float}
    function.argtypes = [kinds[argument] for argument in arguments]
