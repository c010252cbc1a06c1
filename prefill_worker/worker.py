"""A prefill worker: a plain class, run by a process of its own or by a Ray actor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from engine.loader import load_runner
from engine.step import ModelRunner
from kv_transfer.codec_speed import quick_costs
from kv_transfer.sender import KvSender
from kv_transfer.transport import OpenLink
from kv_transfer.transports.grpc_push import GrpcPushLink
from pdcore.config import WorkerConfig
from pdcore.types import Role
from prefill_worker.handler import PrefillHandler
from worker.handler import RoleHandler
from worker.runtime import WorkerRuntime, check_role


class PrefillWorker:
    """Computes prompts and pushes their KV. See `worker.runtime.WorkerRuntime` for its life.

    Args:
        make_runner: builds the model runner. open_link: makes the streams that KV goes by; None: over gRPC, as the
            cluster's hops are secured. Tests put others here.
    """

    def __init__(
        self,
        config: WorkerConfig,
        make_runner: Callable[[WorkerConfig], ModelRunner] = lambda config: load_runner(config.engine),
        open_link: OpenLink | None = None,
    ) -> None:
        check_role(config, Role.PREFILL)
        self.config = config
        self._open_link = open_link
        self.runtime = WorkerRuntime(config, make_handler=self._make_handler, make_runner=make_runner)
        self.incarnation = self.runtime.incarnation
        self.failed: threading.Event = self.runtime.failed

    def _make_handler(self, runtime: WorkerRuntime) -> RoleHandler:
        sender = KvSender(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            store=runtime.runner.cache,
            config=self.config.transfer,
            device=self.config.engine.device,
            codecs=runtime.codecs,
            costs=quick_costs(runtime.codecs, runtime.runner.geometry),
            layers_done=runtime.runner.progress.layers_of,
            clock=runtime.clock,
            faults=runtime.faults,
            on_crash=runtime.crashed,
            encrypted=self.config.encrypted_kv,
            open_link=self._open_link or partial(GrpcPushLink, internal=runtime.internal),
        )
        return PrefillHandler(runtime.engine, sender, runtime.hub, runtime.faults, runtime.loop.wake)

    @property
    def address(self) -> str:
        return self.runtime.address

    @property
    def problem(self) -> str:
        return self.runtime.problem

    def start(self) -> None:
        self.runtime.start()

    def drain(self, timeout_s: float) -> bool:
        return self.runtime.drain(timeout_s)

    def stop(self) -> None:
        self.runtime.stop()
