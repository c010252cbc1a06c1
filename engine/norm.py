"""Root mean square norm of the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.native.library import engine_library

_NATIVE_ROWS = 64  # more of them are worth torch's threads


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension of `x` [rows, width], in its dtype.

    torch composes it of eight operations, which take longer than a decode step's few rows: those go to our own code.
    """
    rows, width = x.shape
    library = engine_library() if rows <= _NATIVE_ROWS and x.dtype is torch.float32 else None
    if library is None or width % 8 or x.stride(1) != 1 or weight.dtype is not torch.float32:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    out = torch.empty(rows, width)
    library.pdmm_rms_norm(x.data_ptr(), rows, x.stride(0), width, weight.data_ptr(), epsilon, out.data_ptr())
    return out
