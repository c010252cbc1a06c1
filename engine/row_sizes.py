"""How many rows a matrix product is given, so that code which is compiled for each number of them is bounded. Pure.

oneDNN compiles a product for the very number of rows that it has, and keeps the code: about half a MiB for each
number and weight shape, a part of it for the life of the process, whatever its cache lets go; and the heap, where the
code lies between the step's own arrays, cannot shrink. The tokens of a step come in every number up to its budget: a
model with four weight shapes of some 576 columns took 1.8 GiB for 1 to 512 of them. With the sizes here it takes 0.16
GiB, and nothing more once each has come.
"""

from __future__ import annotations

_SIZES_A_DOUBLING = 8
"""With so many, an eighth more rows is the most that is computed for nothing, and a sixteenth is common."""


def padded_rows(rows: int) -> int:
    """The least size that holds so many rows: each up to 16, then eight sizes a doubling, 80 in all up to 4096."""
    if rows <= 2 * _SIZES_A_DOUBLING:
        return rows
    step = (1 << ((rows - 1).bit_length() - 1)) // _SIZES_A_DOUBLING
    return -(-rows // step) * step
