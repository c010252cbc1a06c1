"""A worker inside a Ray actor's process: all that the actor shells of both roles share, without Ray."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pdcore.config import WorkerConfig
from pdcore.errors import PdserveError
from worker.openmp import share_cores
from worker.process import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostedInfo:
    """What a hosted worker says of itself."""

    worker_id: str
    incarnation: str
    address: str
    pid: int


class HostedWorker:
    """Starts a worker on construction, and ends its process if the worker fails later, so that Ray starts it anew.

    A worker that cannot start is told by `info`: from a constructor Ray would print it as a traceback, and try again.

    Args:
        config: the worker's configuration, as made on another machine perhaps.
        model: where `config.engine.model_path` comes from; resolved here if this machine lacks the folder.
        host: address of this machine, in place of the configured one; None keeps that.
        make_worker: the worker's class.
    """

    def __init__(
        self, config: WorkerConfig, model: str, host: str | None, make_worker: Callable[[WorkerConfig], Worker]
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        share_cores()
        if not config.engine.threads:
            # Ray sets one OpenMP thread. Torch, not imported yet, takes every core that this process may use instead.
            os.environ.pop("OMP_NUM_THREADS", None)
        self._ended = threading.Event()
        self._worker: Worker | PdserveError
        try:
            worker = make_worker(_place(config, model, host))
            worker.start()
        except PdserveError as error:
            self._worker = error
        else:
            self._worker = worker
            watch = threading.Thread(target=self._exit_on_failure, args=(worker,), name="failure-watch", daemon=True)
            watch.start()

    def info(self) -> HostedInfo:
        """Raises `PdserveError` if the worker cannot start."""
        worker = self._started()
        return HostedInfo(worker.config.worker_id, worker.incarnation, worker.address, os.getpid())

    def wait_end(self, timeout_s: float) -> bool:
        """Wait until `stop` is called; False after `timeout_s`. Lets a caller notice the death of this process."""
        return self._ended.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """See `WorkerRuntime.drain`."""
        return self._started().drain(timeout_s)

    def stop(self) -> None:
        """End the worker. Idempotent."""
        self._ended.set()
        if not isinstance(self._worker, PdserveError):
            self._worker.stop()

    def _started(self) -> Worker:
        if isinstance(self._worker, PdserveError):
            raise self._worker
        return self._worker

    def _exit_on_failure(self, worker: Worker) -> None:
        worker.failed.wait()
        if self._ended.is_set():
            return
        logger.error("%s ends: %s", worker.config.worker_id, worker.problem)
        worker.stop()
        os._exit(1)  # the actor's own threads are Ray's; only the end of the process tells Ray


def _place(config: WorkerConfig, model: str, host: str | None) -> WorkerConfig:
    engine = config.engine
    if not Path(engine.model_path).is_dir():
        from engine.model_store import resolve_model

        engine = replace(engine, model_path=str(resolve_model(model).path))
    return replace(config, engine=engine, host=config.host if host is None else host)
