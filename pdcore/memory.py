"""How much memory this machine has to give. Pure but for the files that it reads."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes that can be taken without swapping: what the kernel estimates, or what a container's limit leaves if that
    is less. None where neither can be read."""
    found = [size for size in (_machine(meminfo), _container(cgroup)) if size is not None]
    return min(found, default=None)


def _machine(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _container(cgroup: Path) -> int | None:
    """What the limit of this process' control group leaves (version 2); None without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no such file, or "max"
        return None
