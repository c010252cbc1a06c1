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
_LEAVING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


@contextmanager
def unechoed() -> Iterator[None]:
    """What is typed within this block is not shown, and forgotten when it ends; Ctrl-C still interrupts.

    Standard input must be a terminal. It is left as it was, also by signals that end or stop the program, which they
    then do as usual; after Ctrl-Z the rest of the block shows what is typed. To be entered on the main thread.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = list(before)
    silent[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ECHONL)

    def restore() -> None:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
        termios.tcflush(terminal, termios.TCIFLUSH)

    def leave(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, leave)  # it was Ctrl-Z, and the program goes on

    # Who has another handler, or ignores a signal, is asked for no more than before.
    ours = [number for number in _LEAVING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        yield
    finally:
        restore()
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
