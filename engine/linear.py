"""Linear layers with weights packed for the CPU's kernels, and the choice of the arithmetic's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.native.linear import NarrowLinear, narrow_linear
from engine.row_sizes import padded_rows

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
        narrow = narrow_linear(weight) if weight.dtype is torch.float32 else None
        self._product: NarrowLinear | _PackedLinear | _PlainLinear = (
            narrow or _PackedLinear.of(weight) or _PlainLinear(weight)
        )

    @property
    def is_packed(self) -> bool:
        """The weight is in another layout than it came in."""
        return not isinstance(self._product, _PlainLinear)

    @property
    def is_narrow(self) -> bool:
        """The weight is kept in bfloat16, though the arithmetic is float32."""
        return isinstance(self._product, NarrowLinear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in] -> [rows, out]."""
        return self._product(x, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + linear(x)``; `residual` [rows, out] is left as it is."""
        return self._product(x, self._bias, residual)


class _PackedLinear:
    """In oneDNN's layout. It is given few numbers of rows, whatever comes: see `engine.row_sizes`."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = packed

    @classmethod
    def of(cls, weight: torch.Tensor) -> _PackedLinear | None:
        """None if there is no such layout for this dtype on this CPU, or this build of torch lacks the operators."""
        try:
            packed = cls(torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS))
            packed(weight[:1], None)  # so that a build that packs but cannot multiply is found out now
        except (RuntimeError, AttributeError):
            return None
        return packed

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = x.shape[0]
        missing = padded_rows(rows) - rows
        if not missing:
            return self._multiply(x, bias, residual)
        below = (0, 0, 0, missing)
        if residual is not None:
            residual = F.pad(residual, below)
        return self._multiply(F.pad(x, below), bias, residual)[:rows]

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        operator = torch.ops.mkldnn._linear_pointwise
        out: torch.Tensor
        if residual is None:
            out = operator(x, self._packed, bias, "none", [], "")
        else:
            out = operator.binary(x, residual, self._packed, bias, "add")
        return out


class _PlainLinear:
    """As torch does it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = F.linear(x, self._weight, bias)
        return out if residual is None else out.add_(residual)
