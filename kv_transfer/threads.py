"""Threads of the transfer: where they run."""

from __future__ import annotations

import os

from pdcore.errors import ConfigError


def check_cores(key: str, cores: tuple[int, ...]) -> None:
    """Raises `ConfigError` if a core of this affinity does not exist on this machine."""
    count = os.cpu_count() or 1
    if any(not 0 <= core < count for core in cores):
        raise ConfigError(key, cores, f"cores 0 to {count - 1}")


def pin_thread(cores: tuple[int, ...]) -> None:
    """Keep the calling thread on `cores`; empty leaves it free."""
    if cores:
        os.sched_setaffinity(0, cores)
