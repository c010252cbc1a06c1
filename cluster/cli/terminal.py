"""The terminal that somebody types at, while an answer comes."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LOCAL_FLAGS = 3  # of the list that termios has for a terminal


@contextmanager
def unechoed() -> Iterator[None]:
    """What is typed within this block is not shown, and forgotten when it ends; Ctrl-C still interrupts.

    Standard input must be a terminal. It is left as it was, also by SIGTERM, which then ends the program as usual. To
    be entered on the main thread.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = list(before)
    silent[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ECHONL)

    def restore() -> None:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
        termios.tcflush(terminal, termios.TCIFLUSH)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    handled = signal.getsignal(signal.SIGTERM)
    if handled is signal.SIG_DFL:  # who has another one, or ignores it, is asked for no more than before
        signal.signal(signal.SIGTERM, end)
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        yield
    finally:
        restore()
        if handled is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, handled)
