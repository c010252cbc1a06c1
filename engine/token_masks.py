"""Token masks on logits: what structured outputs leave of a step's rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class MaskFields(Protocol):
    """The fields of `engine.step.StepInput` that are read here; shapes and dtypes are described there."""

    @property
    def mask_rows(self) -> NDArray[np.int32]: ...
    @property
    def mask_bits(self) -> NDArray[np.uint32]: ...
    def await_masks(self) -> None: ...


def keep_allowed(logits: torch.Tensor, fields: MaskFields) -> torch.Tensor:
    """Logits with -inf for every token that a row's mask leaves out; rows without a mask keep every bit.

    Waits until the masks are there, which is what the forward pass has been given the time for.

    Args:
        logits: float32 [R, V]; not changed.

    Returns:
        `logits` itself if no row has a mask, else a copy.
    """
    if len(fields.mask_rows) == 0:
        return logits
    fields.await_masks()
    words = np.ascontiguousarray(fields.mask_bits, "<u4")
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    left_out = torch.from_numpy(bits == 0)
    rows = torch.from_numpy(fields.mask_rows.astype(np.int64))
    return logits.index_copy(0, rows, logits[rows].masked_fill_(left_out, -torch.inf))
