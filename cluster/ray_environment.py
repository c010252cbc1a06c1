"""What Ray must find in the environment before it is imported. Imports no Ray itself."""

from __future__ import annotations

import os
import sys

from cluster.config import ClusterConfig


def ray_address(config: ClusterConfig) -> str:
    """Where Ray is: as configured, else that of the job that this process belongs to, else one of our own."""
    return config.ray.address or ("auto" if os.environ.get("RAY_ADDRESS") else "local")


def prepare_environment(config: ClusterConfig) -> None:
    """Set what Ray reads from the environment and from nowhere else: how it prints in this process, and what becomes
    of a Ray of our own; others set up theirs.

    An operator's own settings win.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # every worker's lines, and when they come
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray's name for no colours at all
    if ray_address(config) != "local":
        return
    # A Ray for this process alone: nobody to tell about it, and nobody else to let in.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Its processes listen on the loopback interface: one node needs no other. (Ray's name for "more than one node";
    # read when it is imported.)
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # By default Ray lets everything else on the machine go before its workers. These are why it is here.
    os.environ.setdefault("RAY_worker_niceness", "0")
