"""Standard input, output and error as commands find them: closed, full, or of another encoding than text needs."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """Make them fit for any text. Call it before anything opens a file.

    What is closed becomes /dev/null: Python has None there, and the next file that is opened would get its number.
    Characters that an encoding does not have are written as escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write_or_give_up(stream: TextIO, text: str) -> bool:
    """Write to standard output or error; False if it takes no more, for its disk is full or its reader gone.

    It is /dev/null from then on: Python would fail on it again when it ends.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nobody:
            os.dup2(nobody.fileno(), stream.fileno())
        return False
    return True
