"""The C linear layer as Python sees it: torch tensors in, torch tensors out, without the GIL."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from pathlib import Path
from typing import Any

import torch

from pdcore.native_build import NativeUnavailable, open_library

logger = logging.getLogger(__name__)


class NarrowLinear:
    """``x @ weight.T + bias`` with weights kept in bfloat16 and float32 arithmetic.

    A row's result is the same bits whatever rows are beside it, and whatever the number of threads.
    """

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor) -> None:
        """`weight` bfloat16 [out, in], contiguous; a copy is kept in the kernel's layout."""
        self._out, self._in = weight.shape
        self._packed = torch.empty(library.pdmm_packed_bytes(self._out, self._in), dtype=torch.uint8)
        library.pdmm_pack(weight.data_ptr(), self._out, self._in, self._packed.data_ptr())
        self._weights = self._packed.data_ptr()
        self._linear = library.pdmm_linear

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` float32 [rows, in] -> float32 [rows, out]; `bias` [out] and `residual` [rows, out] are added."""
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None:
            residual = residual.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self._out)
        if rows:
            done = self._linear(
                x.data_ptr(),
                rows,
                x.stride(0),
                self._weights,
                self._out,
                self._in,
                None if bias is None else bias.data_ptr(),
                None if residual is None else residual.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
            )
            if not done:
                raise MemoryError(f"{4 * rows * self._in} bytes to put {rows} rows in order")
        return out


def narrow_linear(weight: torch.Tensor) -> NarrowLinear | None:
    """The kernel for float32 `weight` [out, in]; None if there is none here, or a weight is no bfloat16."""
    library = _library()
    if library is None:
        return None
    narrow = weight.to(torch.bfloat16)
    if not torch.equal(narrow.to(weight.dtype), weight):
        return None
    return NarrowLinear(library, narrow.contiguous())


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Built on first use, see `pdcore.native_build`; None, and a word in the log, if that cannot be."""
    try:
        library = open_library("pdmm", Path(__file__).parent)
    except NativeUnavailable as error:
        logger.warning("linear layers run without native code, decoding up to half as fast: %s", error)
        return None
    library.pdmm_supported.restype = ctypes.c_int
    if not library.pdmm_supported():
        logger.info("this CPU has no AVX2: linear layers run in oneDNN")
        return None
    library.pdmm_packed_bytes.restype = ctypes.c_size_t
    _declare(library.pdmm_packed_bytes, "zz")
    _declare(library.pdmm_pack, "pzzp")
    _declare(library.pdmm_linear, "pzzpzzpppu")
    _declare(library.pdmm_threads, "ppp")
    library.pdmm_linear.restype = ctypes.c_int
    _share_threads(library)
    return library


def _share_threads(library: ctypes.CDLL) -> None:
    """Let the kernel run on torch's own threads: a second pool would fight with them for the cores."""
    loaded = set(re.findall(r"\S*/lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*", Path("/proc/self/maps").read_text()))
    torch_s = sorted(path for path in loaded if "torch" in path) or sorted(loaded)
    if not torch_s:
        logger.info("torch's OpenMP runtime was not found: linear layers run on one thread")
        return
    runtime = ctypes.CDLL(torch_s[0])
    functions = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    library.pdmm_threads(*(ctypes.cast(runtime[name], ctypes.c_void_p) for name in functions))


def _declare(function: Any, arguments: str) -> None:
    kinds = {"p": ctypes.c_void_p, "z": ctypes.c_size_t, "u": ctypes.c_uint}
    function.argtypes = [kinds[argument] for argument in arguments]
