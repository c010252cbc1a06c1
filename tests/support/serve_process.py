"""``python -m cluster serve`` as a test runs it: started, read, signalled, and never left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]


class ServeProcess:
    """One serve process in a process group of its own, with its output read as it comes.

    Attributes:
        said: its standard output. output: that and standard error, in about the order in which they came.

    Args:
        shorter: bounds of `cluster.controller`, by name: what they are instead, for a test that has to wait for them.
    """

    def __init__(self, *arguments: str, shorter: Mapping[str, float] | None = None) -> None:
        self.said = self.output = ""
        self.address = ""
        self._more = threading.Condition()
        program = ["-m", "cluster"]
        if shorter:
            changes = "; ".join(f"assert controller.{name}; controller.{name} = {s}" for name, s in shorter.items())
            program = ["-c", f"from cluster import controller; {changes}; from cluster.cli.main import main; main()"]
        self._process = subprocess.Popen(
            [sys.executable, *program, "serve", *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, True), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, False), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, lines: IO[str], said: bool) -> None:
        for line in lines:
            with self._more:
                self.output += line
                self.said += line if said else ""
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first match of `pattern` in the output; fails with the output if it does not come."""
        deadline = time.monotonic() + timeout_s
        with self._more:
            while True:
                match = re.search(pattern, self.output)
                if match:
                    return match
                left = deadline - time.monotonic()
                ended = not any(reader.is_alive() for reader in self._readers)
                if left <= 0 or ended:
                    raise AssertionError(f"no {pattern!r} {'before the end' if ended else 'in time'}:\n{self.output}")
                self._more.wait(min(left, 0.5))

    def wait_ready(self, timeout_s: float = 180.0) -> str:
        """The router's address, once the READY line is there."""
        self.address = self.wait_for(r"(?m)^READY grpc=(\S+)", timeout_s)[1]
        return self.address

    def family(self) -> list[psutil.Process]:
        """This process and all that it has started, Ray's among them."""
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def signal_group(self, signum: int) -> None:
        """As `timeout` or a closing terminal does: the signal goes to Ray's processes as well."""
        os.killpg(self._process.pid, signum)

    def wait(self, timeout_s: float = 90.0) -> int:
        """Exit status."""
        status = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join(10.0)
        return status

    def stop(self) -> None:
        """End it and everything that it started, whatever its state."""
        family = self.family()
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)  # at once, without draining
            try:
                self._process.wait(30.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10.0)
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass  # as it should be
