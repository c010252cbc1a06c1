"""Makes OpenMP share its cores with others. Must be called before torch is imported."""

from __future__ import annotations

import os


def share_cores() -> None:
    """Let OpenMP threads sleep, not spin, at the end of a parallel region.

    A spinning thread keeps the core from whoever would end its wait: with two workers on two cores, spinning made a
    decode step take up to eight times as long. OpenMP reads this from the environment when its library is loaded, and
    from nowhere else. An operator's own setting wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
