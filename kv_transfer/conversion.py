"""KV of one element type in a cache of another.

Which conversions a receiver does is decided by `pdcore.config.convertible`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kv_transfer.codecs.floats import bits, round_into, to_float32

_NAN_BFLOAT16: Final = 0x7FC0

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """`values`, contiguous and of type `source`, as `target`: rounded to nearest, ties to even.

    Too large numbers become infinite. numpy, not torch: a torch copy would start a thread pool beside the engine's.
    """
    if source == target:
        return values
    wide = to_float32(bits(values.view(torch.uint8).numpy().reshape(-1), source), source)
    out = np.empty(wide.size, "<u4" if target == "float32" else "<u2")
    broken = np.isnan(wide) if target == "bfloat16" else None
    # `round_into` uses its argument up, which may be the caller's own memory.
    round_into(wide.copy() if source == "float32" else wide, target, out)
    if broken is not None:
        out[broken] = _NAN_BFLOAT16  # adding to round would have turned its bits into those of a number
    return torch.from_numpy(out.view(np.uint8)).view(TORCH_DTYPES[target]).view(values.shape)
