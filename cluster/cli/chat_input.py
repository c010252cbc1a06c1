"""What a person types in a chat, or a pipe sends: turns of one line or of several."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

import typer

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

    A line with line breaks in it, which was pasted, is a turn as it is, unless it is such a block.
    '''

    def __init__(self, read_line: ReadLine) -> None:
        self._read_line = read_line
        self.in_message = False
        """Whether some lines of a turn have been read, and others are to come: Ctrl-C there forgets them."""

    def next(self) -> str | None:
        """The next turn; None where there are no more. What Ctrl-C interrupts is forgotten."""
        self.in_message = False
        line = self._read_line(PROMPT)
        if line is None:
            return None
        bare = line.strip()
        if "\n" in line and not (bare.startswith(BLOCK) and bare.endswith(BLOCK)):
            # It was pasted: quotes, backslashes and slashes are its own. One more slash says that it is no command.
            return f"/{line}" if line.startswith("/") else line
        if bare.startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            line = self._more()
        return "\n".join([*lines, *([] if line is None else [line])])

    def _block(self, line: str | None) -> str:
        lines: list[str] = []
        while line is not None:
            if line.rstrip().endswith(BLOCK):
                lines.append(line.rstrip().removesuffix(BLOCK))
                break
            lines.append(line)
            line = self._more()
        return "\n".join(lines).strip("\n")

    def _more(self) -> str | None:
        self.in_message = True
        line = self._read_line(MORE)
        self.in_message = False
        return line


def read_piped(prompt: str) -> str | None:
    """A line of standard input, which nobody types. Ends the command if it is not text."""
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise fail("that is not valid UTF-8", EXIT_USAGE) from None
    return line.removesuffix("\n").removesuffix("\r") if line else None


def read_typed(prompt: str) -> str | None:
    """A line that somebody types, with editing and earlier lines by the arrow keys where Python has them.

    What is pasted is one line, with line breaks in it, where the GNU readline is there. With standard output
    elsewhere the prompt goes to standard error, and there is no editing but the terminal's own.
    """
    try:
        if not sys.stdout.isatty():
            return _read_elsewhere(prompt)
        _edit_lines()
        return input(prompt).rstrip("\n")
    except EOFError:
        typer.echo(err=True)
        return None
    except UnicodeDecodeError:
        print("that was not text; it is ignored", file=sys.stderr)
        return ""


def _read_elsewhere(prompt: str) -> str:
    typer.echo(prompt, nl=False, err=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@functools.cache
def _edit_lines() -> None:
    try:
        import readline  # changes what input() does
    except ImportError:  # not everywhere
        return
    # The editline has no such setting, and a dumb terminal would show what turns it on.
    if "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")
