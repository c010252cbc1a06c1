"""What a person at the terminal is told while the cluster runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


def unfailing(report: Report) -> Report:
    """`report`, on which nothing depends: whoever read it may be gone (``serve | head``), and nobody shall be left
    unwatched or undrained for that. What could not be told is in the log."""

    def told(line: str) -> None:
        try:
            report(line)
        except Exception as error:  # noqa: BLE001  # it is somebody else's
            logger.warning("%s (nobody was told: %s)", line, type(error).__name__)

    return told
