"""Requests that a prefill worker runs as a whole, because no worker that should decode serves.

It does so with the same engine, beside the prompts of others: slower than a decode worker, but it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.engine import Engine, StepResult
from engine.sequence import SequenceKind
from pdcore.errors import PdserveError
from pdcore.types import RequestKey, RequestSpec
from worker.handler import Reporter, failed_notice


class WholeRequests:
    """Those that are here, samples under keys of their own. Thread-safe."""

    def __init__(self, engine: Engine, reporter: Reporter, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._reporter = reporter
        self._wake = wake
        self._lock = threading.Lock()
        self._requests: dict[RequestKey, RequestSpec] = {}

    def __contains__(self, key: RequestKey) -> bool:
        with self._lock:
            return key in self._requests

    def keys(self) -> Sequence[RequestKey]:
        with self._lock:
            return list(self._requests)

    def generate(self, spec: RequestSpec) -> None:
        """Take a request; raises PdserveError, and holds nothing of it, if it cannot run here."""
        self._engine.check_runnable(spec)  # without the lock, for it may take a while
        with self._lock:
            self._engine.add(spec, SequenceKind.GENERATE)
            self._requests.update(dict.fromkeys((spec.key, *spec.branch_keys), spec))
        self._wake()

    def abort(self, key: RequestKey) -> bool:
        """End a request, of a trunk the branches too that it has not become; False if it is none of these."""
        if not self._drop(key):
            return False
        self._engine.abort(key)
        self._wake()
        return True

    def credit(self, key: RequestKey, tokens: int) -> None:
        """The client took so many tokens."""
        self._engine.add_credit(key, tokens)
        self._wake()

    def begin_report(self, result: StepResult) -> None:
        """Before the step's tokens are reported: trunks have become their branches."""
        for trunk in result.forked:
            with self._lock:
                if self._requests.pop(trunk, None) is None:
                    continue
            self._reporter.branched(trunk)

    def end_report(self, result: StepResult) -> None:
        """After the step's tokens were reported: what is over is forgotten, what was given up is reported."""
        for key in (token.key for token in result.tokens if token.finish is not None):
            if self._drop(key):
                self._reporter.forget(key)

    def reject(self, key: RequestKey, error: PdserveError) -> bool:
        """The engine has given a request up; False if it is none of these."""
        if not self._drop(key):
            return False
        self._reporter.notice(key, failed_notice(error))
        self._reporter.forget(key)
        return True

    def _drop(self, key: RequestKey) -> bool:
        with self._lock:
            spec = self._requests.pop(key, None)
            if spec is None:
                return False
            if spec.key == key:
                for branch in spec.branch_keys:
                    self._requests.pop(branch, None)
            return True
