"""A process that compiles what clients send, so that nothing they send can hurt the router, or the workers after it.

The library's own limits bound most of what a grammar may cost, but not all: some are compiled for minutes, some end
the process. What this one survives, within its time, memory and stack, a worker survives too: it has more of each.

Run by `router.structured` as ``python -m router.grammar_check``. Standard input and output carry frames, 4 bytes of
length and JSON: first the tokenizer, then one structured output after the other, each answered by what is wrong.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
import threading
import time
from typing import IO, Any

from pdcore.errors import InvalidRequest, ModelError
from pdcore.grammar import GrammarCompiler, load_tokenizer
from pdcore.structured import StructuredOutput, StructureKind

MAX_CPU_S = 0.5
"""Processor time that a compilation may take, since workers are to do it too. At twice as much the process ends."""
TOO_LONG = f"takes more than {MAX_CPU_S:g} s to compile"
_MAX_WALL_S = 30.0  # for whatever waits without computing
_MAX_MEMORY_BYTES = 4 << 30
_STACK_BYTES = 1 << 20  # of the compiling thread; those of workers have 2 MiB and more

TIME_IS_UP = (signal.SIGPROF, signal.SIGALRM)
"""Signals by which the process ends if a structured output takes too long."""

_LENGTH = struct.Struct("<I")


def write_frame(stream: IO[bytes], content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    data = stream.read(length)
    return json.loads(data) if len(data) == length else None


def describe(output: StructuredOutput) -> dict[str, Any]:
    """A structured output as the content of a frame."""
    return {"kind": output.kind.value, "sources": output.sources}


def verdict(compiler: GrammarCompiler, asked: dict[str, Any]) -> dict[str, str]:
    """The answer to `describe`: ``field`` and ``problem``, or nothing if all is well."""
    output = StructuredOutput(StructureKind(asked["kind"]), tuple(asked["sources"]))
    started = time.process_time()
    try:
        compiler.matcher(output)
    except InvalidRequest as error:
        return {"field": error.field, "problem": error.problem}
    spent = time.process_time() - started
    if spent > MAX_CPU_S:
        return {"field": output.field, "problem": TOO_LONG}
    return {}


def _serve(source: IO[bytes], sink: IO[bytes]) -> None:
    first = read_frame(source)
    if first is None:
        return
    try:
        compiler = GrammarCompiler(load_tokenizer(first["tokenizer"], first["vocab_size"], first["end_token_id"]))
    except ModelError as error:
        write_frame(sink, {"problem": str(error)})
        return
    write_frame(sink, {})
    while (asked := read_frame(source)) is not None:
        # Their signals end the process.
        signal.setitimer(signal.ITIMER_PROF, 2 * MAX_CPU_S)
        signal.setitimer(signal.ITIMER_REAL, _MAX_WALL_S)
        answer = verdict(compiler, asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sink, answer)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for signum in TIME_IS_UP:
        signal.signal(signum, signal.SIG_DFL)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
