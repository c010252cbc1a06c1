"""Linear layers with weights packed for the CPU's kernels, and the choice of the arithmetic's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.native.linear import narrow_linear

_PACK_ROWS = 512  # oneDNN picks a layout for about this many rows; it serves small batches as well


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to calculate in, for weights and cache of `dtype`.

    A CPU without bf16 (fp16) instructions multiplies such matrices ten times slower than float32 ones. There the same
    rounded weights and KV are widened, and only the arithmetic between them is float32.
    """
    mkldnn = torch.ops.mkldnn
    if dtype is torch.bfloat16 and mkldnn._is_mkldnn_bf16_supported():
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    if dtype is torch.float16 and mkldnn._is_mkldnn_fp16_supported():
        return torch.float16 if torch.cpu._is_amx_fp16_supported() else torch.float32
    return torch.float32


class Linear:
    """``x @ weight.T + bias``, optionally added to a residual in the same call.

    Where the arithmetic is float32 and every weight is a bfloat16, the weight is kept as such in the layout of our
    own kernel; else in oneDNN's blocked layout where that is available for its dtype; else as it is.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out, in] and `bias` [out], contiguous, in the compute dtype."""
        self._bias = bias
        self._narrow = narrow_linear(weight) if weight.dtype is torch.float32 else None
        if self._narrow is not None:
            self.is_packed = True
            return
        packed = _packed(weight)
        self.is_packed = packed is not None
        self._weight = weight if packed is None else packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in] -> [rows, out]."""
        if self._narrow is not None:
            return self._narrow(x, self._bias)
        if self.is_packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + linear(x)``; `residual` [rows, out] is left as it is."""
        if self._narrow is not None:
            return self._narrow(x, self._bias, residual)
        if self.is_packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
            return out
        return F.linear(x, self._weight, self._bias).add_(residual)


def _packed(weight: torch.Tensor) -> torch.Tensor | None:
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        # Tried once here, so that a build that packs but cannot multiply is found out now.
        torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # not for this dtype on this CPU, or a build without the operators
        return None
    return packed
