"""Killing every process that this one has started, and those that they have."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_descendants() -> None:
    """Send SIGKILL to all of them, by process number and to nobody else. Linux."""
    handles: dict[int, int] = {}
    for pid in _descendants():
        with suppress(OSError):  # it has ended meanwhile
            handles[pid] = os.pidfd_open(pid)
    # A number may have gone to a stranger before its handle was made, but not after: looked at again, all are ours.
    ours = set(_descendants())
    for pid, handle in handles.items():
        if pid in ours:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def _descendants() -> list[int]:
    """Process numbers, parents before their children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            # "pid (name) state parent ...", where the name may have anything in it.
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]
