"""The first tokens of a sequence, which the coarser codecs keep as they are.

Attention leans on them from everywhere, so that their error costs more than that of all others; and they are few.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import SectionShape

SINK_TOKENS: Final = 4


def kept_tokens(shape: SectionShape) -> int:
    """Tokens at a section's start that are within the first `SINK_TOKENS` of the sequence."""
    return min(max(SINK_TOKENS - shape.token_start, 0), shape.token_count)


def by_token(elements: NDArray[np.unsignedinteger], shape: SectionShape) -> NDArray[np.unsignedinteger]:
    """A section's elements as a view [layers, tokens, heads * dim]."""
    return elements.reshape(shape.layer_count, shape.token_count, shape.head_count * shape.head_dim)
