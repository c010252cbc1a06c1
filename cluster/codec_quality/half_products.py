"""16-bit matrix products as hardware for them makes them, on a CPU that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from engine.linear import compute_dtype

_PRODUCTS = (F.linear, torch.bmm, torch.baddbmm)


def fast_products(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Within it, products of matrices of `dtype` are fast and accumulate in float32.

    Where the CPU multiplies them itself, nothing changes. Elsewhere torch does so by a loop that takes ten times as
    long as float32 products; widening, multiplying and rounding once gives the same numbers, up to the order of sums.
    """
    return nullcontext() if compute_dtype(dtype) is dtype else _Widened(dtype)


class _Widened(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        wide = tuple(arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return func(*wide, **(kwargs or {})).to(self._dtype)
