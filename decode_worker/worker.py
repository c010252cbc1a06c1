"""A decode (or aggregated) worker: a plain class, run by a process of its own or by a Ray actor."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from decode_worker.handler import DecodeHandler
from engine.loader import load_runner
from engine.step import ModelRunner
from kv_transfer.codec_speed import quick_costs
from kv_transfer.receiver import KvReceiver
from pdcore.config import WorkerConfig
from pdcore.types import Role
from protos import kv_pb2_grpc
from worker.handler import RoleHandler
from worker.runtime import WorkerRuntime, check_role


class DecodeWorker:
    """Takes KV under tickets and decodes; runs whole requests too. See `WorkerRuntime` for its life.

    An aggregated worker is the same thing without a KV service: it runs whole requests only.
    """

    def __init__(
        self,
        config: WorkerConfig,
        make_runner: Callable[[WorkerConfig], ModelRunner] = lambda config: load_runner(config.engine),
    ) -> None:
        check_role(config, Role.DECODE, Role.AGGREGATED)
        self.config = config
        self._receiver: KvReceiver | None = None
        self.runtime = WorkerRuntime(
            config, make_handler=self._make_handler, add_services=self._add_services, make_runner=make_runner
        )
        self.incarnation = self.runtime.incarnation
        self.failed: threading.Event = self.runtime.failed

    def _make_handler(self, runtime: WorkerRuntime) -> RoleHandler:
        grants = self.config.role is Role.DECODE
        handler = DecodeHandler(
            runtime.engine,
            runtime.hub,
            runtime.faults,
            wake=runtime.loop.wake,
            address=lambda: runtime.address,
            grants=grants,
        )
        if grants:
            self._receiver = handler.receiver = KvReceiver(
                worker_id=self.config.worker_id,
                incarnation=self.incarnation,
                store=runtime.runner.cache,
                config=self.config.transfer,
                device=self.config.engine.device,
                encrypted=self.config.encrypted_kv,
                codecs=runtime.codecs,
                costs=quick_costs(runtime.codecs, runtime.runner.geometry),
                host=handler,
                clock=runtime.clock,
                faults=runtime.faults,
                on_crash=runtime.crashed,
            )
        return handler

    def _add_services(self, server: grpc.Server) -> None:
        if self._receiver is not None:
            kv_pb2_grpc.add_KvServicer_to_server(self._receiver.servicer(), server)

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
