"""The tries of one call of a client: when to make the next one, and what it ends with."""

from __future__ import annotations

import random
from collections.abc import Callable

from pdcore.errors import RequestError
from router.client_retry import Retry
from router.failover import Deadline


class Tries:
    """When to make the next one.

    Args:
        timeout_s: of the call, tries and waits included; None for no bound. ValueError is raised for what is none.
        failed: told the error that the call ends with; returns the one to raise.
    """

    def __init__(
        self,
        retry: Retry,
        timeout_s: float | None,
        failed: Callable[[RequestError], RequestError] = lambda error: error,
    ) -> None:
        self.deadline = Deadline(timeout_s)
        self._retry = retry
        self._failed = failed
        self._tried = 0
        self._waited_s = 0.0

    def wait_s(self, error: RequestError, final: bool = False) -> float:
        """Seconds to wait before the next one; raises `error` if there is none, or it is `final`."""
        self._tried += 1
        left_s = self.deadline.left_s
        wait = self._retry.wait_s(error, self._tried, self._waited_s, left_s, random.random())
        if wait is None or final:
            raise self._failed(error)
        self._waited_s += wait
        return wait
