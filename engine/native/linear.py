"""The C linear layer as Python sees it: torch tensors in, torch tensors out, without the GIL."""

from __future__ import annotations

import ctypes

import torch

from engine.native.library import engine_library


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
    library = engine_library()
    if library is None:
        return None
    narrow = weight.to(torch.bfloat16)
    if not torch.equal(narrow.to(weight.dtype), weight):
        return None
    return NarrowLinear(library, narrow.contiguous())
