"""Token masks on logits: what structured outputs leave of a step's rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_NEVER = torch.tensor(-torch.inf)


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
    rows, vocab_size = logits.shape
    # Spread to all rows while they are bits: that is a few kilobytes a row.
    words = np.full((rows, fields.mask_bits.shape[1]), 0xFFFFFFFF, "<u4")
    words[fields.mask_rows] = fields.mask_bits
    left_out = np.unpackbits((~words).view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    return torch.where(torch.from_numpy(left_out), _NEVER, logits)
