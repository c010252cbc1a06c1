"""A line for somebody at a terminal who has seen nothing for a while."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType

AFTER_S = 2.0
_WORDS = "waiting for the first token ..."
_DIM, _PLAIN, _ERASED = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


class Waiting:
    """Shows on standard error, if that is a terminal, that the first token has not come after `AFTER_S`.

    The line is gone once it has (on a terminal that cannot erase it, it ends). To be entered for one answer.

    Args:
        wanted: False shows nothing.
    """

    def __init__(self, wanted: bool) -> None:
        self._lock = threading.Lock()
        self._over = self._shown = False
        self._erases = os.environ.get("TERM", "dumb") != "dumb"
        self._timer = threading.Timer(AFTER_S, self._show) if wanted and sys.stderr.isatty() else None

    def __enter__(self) -> Waiting:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Something has come, or will not. May be called again."""
        if self._timer is None or self._over:
            return
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown:
                sys.stderr.write(_ERASED if self._erases else "\n")
                sys.stderr.flush()

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                self._shown = True
                sys.stderr.write(f"{_DIM}{_WORDS}{_PLAIN}" if self._erases else _WORDS)
                sys.stderr.flush()
