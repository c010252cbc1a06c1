"""What a person types in a chat, or a pipe sends: turns of one line or of several."""

from __future__ import annotations

import sys
from collections.abc import Callable

from cluster.cli.client import EXIT_USAGE, fail

PROMPT, MORE = "> ", ". "
BLOCK = '"""'

ReadLine = Callable[[str], str | None]
"""Called with a prompt; a line without its end, or None where there are no more."""


class Turns:
    r'''Puts lines together to turns.

    ::

        a line                     is a turn
        a line that ends with \    goes on in the next one
        """a line                  begins a turn that goes on
        until this line"""         up to the one that ends like this, or the end of the input
    '''

    def __init__(self, read_line: ReadLine) -> None:
        self._read_line = read_line

    def next(self) -> str | None:
        """The next turn; None where there are no more. What Ctrl-C interrupts is forgotten."""
        line = self._read_line(PROMPT)
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            line = self._read_line(MORE)
        return "\n".join([*lines, *([] if line is None else [line])])

    def _block(self, line: str | None) -> str:
        lines: list[str] = []
        while line is not None:
            if line.rstrip().endswith(BLOCK):
                lines.append(line.rstrip().removesuffix(BLOCK))
                break
            lines.append(line)
            line = self._read_line(MORE)
        return "\n".join(lines).strip("\n")


def read_piped(prompt: str) -> str | None:
    """A line of standard input, which nobody types. Ends the command if it is not text."""
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise fail("that is not valid UTF-8", EXIT_USAGE) from None
    return line.removesuffix("\n").removesuffix("\r") if line else None


def read_typed(prompt: str) -> str | None:
    """A line that somebody types, with editing and earlier lines by the arrow keys where Python has them."""
    try:
        import readline  # noqa: F401  # changes what input() does
    except ImportError:  # not everywhere
        pass
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
    except UnicodeDecodeError:
        print("that was not text; it is ignored", file=sys.stderr)
        return ""
