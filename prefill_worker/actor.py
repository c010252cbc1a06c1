"""The Ray actor of a prefill worker: a thin shell."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import ray

from pdcore.config import WorkerConfig
from pdcore.grpc_log import quiet_grpc

if TYPE_CHECKING:
    from worker.hosted import HostedInfo, HostedWorker


# Control calls have threads of their own: they are answered while another call waits.
@ray.remote(concurrency_groups={"control": 4, "watch": 2})
class PrefillActor:
    """See `HostedWorker`, to which everything is passed on."""

    def __init__(self, config: WorkerConfig, model: str, use_node_address: bool) -> None:
        quiet_grpc(os.environ)  # a Ray that was there before us has its own environment
        from prefill_worker.worker import PrefillWorker  # torch comes with it, which the driver does not need
        from worker.hosted import HostedWorker

        host = ray.util.get_node_ip_address() if use_node_address else None
        self._hosted = HostedWorker(config, model, host, PrefillWorker)

    @ray.method(concurrency_group="control")
    def info(self) -> HostedInfo:
        return self._hosted.info()

    @ray.method(concurrency_group="watch")
    def wait_end(self, timeout_s: float) -> bool:
        return self._hosted.wait_end(timeout_s)

    @ray.method(concurrency_group="control")
    def drain(self, timeout_s: float) -> bool:
        return self._hosted.drain(timeout_s)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        self._hosted.stop()

    def __ray_shutdown__(self) -> None:
        hosted: HostedWorker | None = getattr(self, "_hosted", None)  # missing if the worker could not start
        if hosted is not None:
            hosted.stop()
