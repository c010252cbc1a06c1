"""Two network namespaces joined by a link of a given speed: several hosts on one machine, for measurements.

Needs root, iproute2 and a kernel with veth and tbf; says so otherwise. Leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

HOSTS = ("10.83.0.1", "10.83.0.2")


class LinkUnavailable(Exception):
    """Links cannot be made here; the text says what is missing."""


class ShapedLink:
    """Use with ``with``. Whatever runs by `command(side, ...)` sees one address of `HOSTS` and nothing else.

    Args:
        owner: process that made the link; a child of it may change the rate of its parent's link.
    """

    def __init__(self, owner: int | None = None) -> None:
        self.owner = owner or os.getpid()
        self._namespaces = tuple(f"pdserve-{side}-{self.owner}" for side in "ab")
        self._interfaces = tuple(f"pd{side}{self.owner}" for side in "ab")

    def __enter__(self) -> ShapedLink:
        if os.geteuid() != 0:
            raise LinkUnavailable("shaping a link takes root: network namespaces and tc are the administrator's")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinkUnavailable(f"{tool} is not installed: shaping a link takes iproute2")
        try:
            for namespace in self._namespaces:
                _run("ip", "netns", "add", namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            a, b = self._interfaces
            _run("ip", "link", "add", a, "type", "veth", "peer", "name", b)
            for namespace, interface, address in zip(self._namespaces, self._interfaces, HOSTS, strict=True):
                _run("ip", "link", "set", interface, "netns", namespace)
                _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
                _run("ip", "-n", namespace, "link", "set", interface, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def set_rate(self, gbit: float) -> None:
        """Let each direction carry so many Gbit/s. A bucket of 2 ms (at least 64 KiB) keeps bursts short."""
        burst = max(64 << 10, int(gbit * 1e9 / 8 * 0.002))
        for namespace, interface in zip(self._namespaces, self._interfaces, strict=True):
            _run(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf"),
                *("rate", f"{int(gbit * 1e6)}kbit", "burst", str(burst), "latency", "100ms"),
            )

    def command(self, side: int, *arguments: str) -> list[str]:
        """`arguments` as a command that runs on one side: 0 or 1."""
        return ["ip", "netns", "exec", self._namespaces[side], *arguments]

    def _remove(self) -> None:
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LinkUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
