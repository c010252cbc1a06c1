"""A child process that is spoken to over its pipes, for whichever event loop this one runs on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

MAX_ANSWER_BYTES = 65536
_POLL_S = 0.05


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
        self._asking = self._closed = False

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    async def ask(self, line: bytes) -> bytes:
        """Write a line to it and read one, once; empty if it ends before. Bounded only by its end: if it is to take
        no longer, `kill` it.

        Raises:
            OSError: it has closed its standard input. ValueError: its answer has more than `MAX_ANSWER_BYTES`.
        """
        assert not self._asking
        self._asking = True
        # Of its own: it may take long, and others have to start meanwhile.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"child-{self._process.pid}")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, self._ask, line)
        finally:
            thread.shutdown(wait=False)

    def _ask(self, line: bytes) -> bytes:
        try:
            self._stdin.write(line + b"\n")
            self._stdin.flush()
            answer = self._stdout.readline(MAX_ANSWER_BYTES)
            if len(answer) == MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            return answer
        finally:
            self._asking = False
            if self._closed:
                self._close_pipes()

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Ask it to end: it reads the end of its standard input. One that still has to answer is killed, since a
        thread may wait for it to read, and nobody can close a pipe that is being written to."""
        if self._asking:
            self.kill()
        else:
            self._close_input()

    async def wait(self) -> int:
        """Wait for its end, without a thread; returns `returncode`."""
        if (code := self.returncode) is not None:
            return code
        try:
            handle = os.pidfd_open(self._process.pid)  # ours until `poll` sees its end, so it is no other's number
        except OSError:  # too many open files
            while (code := self.returncode) is None:
                await asyncio.sleep(_POLL_S)
            return code
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(handle, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self._process.wait()

    def close(self) -> None:
        """Close the pipes of one that has ended."""
        self._closed = True
        if not self._asking:  # else its thread does, if a process that inherited a pipe lives on
            self._close_pipes()

    def _close_pipes(self) -> None:
        self._close_input()
        self._stdout.close()

    def _close_input(self) -> None:
        try:
            self._stdin.close()
        except BrokenPipeError:  # it has ended before it read all that was written
            pass
