"""By what means the kernels' work is done, and where."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

Backend: TypeAlias = Literal["triton", "torch"]
"""``triton``: kernels, on a GPU (on the CPU in Triton's interpreter). ``torch``: the reference, anywhere."""


def backend_for(device: torch.device) -> Backend:
    """Triton where it is installed and has a GPU to run on; torch elsewhere."""
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on torch's current device: make that the one of `tensor`."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
