"""Structured outputs are compiled before a worker hears of them, so that a bad one is refused at once.

A process of its own compiles (`router.grammar_check`): whatever a client sends, the worst that can happen is that
this process ends, and the next check starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdcore.errors import InvalidRequest, Overloaded
from pdcore.structured import StructuredOutput
from router.grammar_check import TIME_IS_UP, TOO_LONG, describe, read_frame, write_frame

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Checks that wait for the process, at most."""
REMEMBERED = 1024
"""Verdicts that are kept."""


class StructureCheck:
    """Says of structured outputs whether workers can compile them. To be used on one event loop.

    One check runs at a time, and nothing else of the router waits for it: what a flood of costly grammars can take is
    one core.

    Args:
        tokenizer_json: content of the served model's ``tokenizer.json``; asked for at the first check.
        end_token_id: any of the model's end tokens.
    """

    def __init__(self, tokenizer_json: Callable[[], str], end_token_id: int | None) -> None:
        self._tokenizer_json = tokenizer_json
        self._end_token_id = end_token_id
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, InvalidRequest | None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None  # the thread's own

    def close(self) -> None:
        """End the process; what waits for it is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    async def check(self, output: StructuredOutput, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the field and what the compiler says; Overloaded if too many wait."""
        output.check_size()  # before anything is hashed or queued
        digest = output.digest
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            verdict = self._verdicts[digest]
        else:
            verdict = await self._ask(output, vocab_size)
            self._verdicts[digest] = verdict
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        if verdict is not None:
            raise InvalidRequest(verdict.field, verdict.problem)

    async def _ask(self, output: StructuredOutput, vocab_size: int) -> InvalidRequest | None:
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} structured outputs are waiting to be checked", 1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._verdict, output, vocab_size)
        finally:
            self._waiting -= 1

    # -- on the thread -----------------------------------------------------------------------------------------

    def _verdict(self, output: StructuredOutput, vocab_size: int) -> InvalidRequest | None:
        try:
            process = self._started(vocab_size)
        except _Unusable as error:
            return InvalidRequest(output.field, str(error))
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, describe(output))
            answer = read_frame(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            return InvalidRequest(output.field, self._ended(process, output))
        return InvalidRequest(answer["field"], answer["problem"]) if answer else None

    def _started(self, vocab_size: int) -> subprocess.Popen[bytes]:
        """The process, with its tokenizer. Raises _Unusable if that cannot be used."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        # It must find this very program, from wherever that was started.
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)])
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "router.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the router, which ends it by closing its input
        )
        assert process.stdin is not None
        assert process.stdout is not None
        first = {
            "tokenizer": self._tokenizer_json(),
            "vocab_size": vocab_size,
            "end_token_id": self._end_token_id,
        }
        write_frame(process.stdin, first)
        answer = read_frame(process.stdout)
        if answer is None:
            raise RuntimeError(f"the process that checks structured outputs ended with status {process.wait()}")
        if answer:
            process.wait()
            raise _Unusable(answer["problem"])
        return process

    def _ended(self, process: subprocess.Popen[bytes], output: StructuredOutput) -> str:
        """What it means that the process has ended."""
        status = process.wait()
        logger.warning("compiling a %s ended its process with status %d", output.kind.value, status)
        if -status in TIME_IS_UP:
            return TOO_LONG
        return "is more than the compiler can take"


class _Unusable(Exception):
    """The model's tokenizer is of no use for structured output."""
