"""A child process that is spoken to over its pipes, for whichever event loop this one runs on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence


class ChildProcess:
    """Started at once, in a session of its own, with pipes for its standard input and output.

    Neither loop's own ``create_subprocess_exec`` does: uvloop's calls fork(), which runs gRPC's handlers for that
    in the child while gRPC's threads are busy here, and now and then one of them aborts it. `subprocess` uses
    vfork(), which runs none.

    Raises:
        OSError: the command cannot be run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    async def ask(self, line: bytes) -> bytes:
        """Write a line to it and read one; empty if it ends before. Bounded only by its end: if it is to take no
        longer, `kill` it.

        Raises:
            OSError: it has closed its standard input.
        """
        return await asyncio.to_thread(self._ask, line)

    def _ask(self, line: bytes) -> bytes:
        self._stdin.write(line + b"\n")
        self._stdin.flush()
        return self._stdout.readline()

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close_input(self) -> None:
        """It reads the end of its standard input."""
        try:
            self._stdin.close()
        except BrokenPipeError:  # it has ended before it read all that was written
            pass

    async def wait(self) -> int:
        """Wait for its end, without a thread; returns `returncode`."""
        if (code := self.returncode) is not None:
            return code
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(self._process.pid)  # ours until `poll` sees its end, so it is no other's number
        try:
            loop.add_reader(handle, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self._process.wait()

    def close(self) -> None:
        """Close the pipes of one that has ended."""
        self.close_input()
        self._stdout.close()
