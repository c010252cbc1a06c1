"""Makes OpenMP and BLAS share their cores with others. Must be called before torch and numpy are imported."""

from __future__ import annotations

import os

_SPINS = "2000"
"""Tens of microseconds: long enough for the gap between two operations, too short to keep a core from anyone."""


def share_cores() -> None:
    """Let OpenMP threads spin briefly, then sleep, at the end of a parallel region; keep numpy's BLAS to its caller.

    By default they spin for milliseconds and keep the core from whoever would end their wait: with two busy processes
    beside it on two cores, a chain of small matrix products took five to eight times as long. Sleeping at once
    (``OMP_WAIT_POLICY=PASSIVE``) costs a third of the speed on idle cores. GNU OpenMP reads this from the environment
    when its library is loaded, and from nowhere else. An operator's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    # Codecs multiply matrices on transfer threads, through numpy: a pool of its own would take the engine's cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
