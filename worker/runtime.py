"""A worker process without its role: engine, step loop, gRPC server, sessions, registration, and their life.

::

    NEW --start()--> SERVING --drain()--> DRAINING --stop()--> STOPPED
                        '------- step fails, refused by the controller -------> FAILED (then stop())
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.engine import Engine
from engine.loader import load_runner
from engine.sequence import SequenceKind
from engine.step import ModelRunner
from engine.structured import OutputGuards
from kv_transfer.codecs.registry import worker_codecs
from kv_transfer.native.library import native_status
from kv_transfer.negotiation import may_use
from kv_transfer.threads import check_cores
from kv_transfer.transports.catalog import available_transports
from pdcore.clock import Clock, MonotonicClock
from pdcore.config import PLAINTEXT_TRANSPORTS, WorkerConfig
from pdcore.errors import ConfigError, InvalidRequest, PdserveError
from pdcore.faults import FaultPoints
from pdcore.listening import was_refused
from pdcore.types import PROTOCOL_VERSION, RequestKey, RequestSpec, Role, SamplingParams, WorkerLoad
from protos import membership_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import geometry_to_proto, model_to_proto, role_to_proto
from security.internal import Internal
from worker.engine_loop import EngineLoop
from worker.grpc_options import SERVER_OPTIONS
from worker.handler import RoleHandler
from worker.registration import Registration
from worker.session import SessionHub

logger = logging.getLogger(__name__)

# Streams hold a thread each for their whole life: one per router, one per prefill worker that sends here.
_MAX_STREAMS = 1024
_WARM_UP_TOKENS = 32
_STUCK_S = 10.0


class WorkerRuntime:
    """Everything of a worker but what its role does with commands, plans and results.

    Args:
        config: the worker's configuration.
        make_handler: builds the role's part; called by `start` once the engine exists.
        add_services: adds the role's own gRPC services to the server.
        make_runner: builds the model runner; tests put a fake one here.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        make_handler: Callable[[WorkerRuntime], RoleHandler],
        add_services: Callable[[grpc.Server], None] = lambda server: None,
        make_runner: Callable[[WorkerConfig], ModelRunner] = lambda config: load_runner(config.engine),
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.internal = Internal(config.security)
        self.clock = clock or MonotonicClock()
        self.incarnation = uuid.uuid4().hex
        self.faults = FaultPoints(config.faults)
        self.address = ""
        self.problem = ""  # why the worker has failed
        self.failed = threading.Event()
        self._make_handler = make_handler
        self._add_services = add_services
        self._make_runner = make_runner
        self._registration: Registration | None = None
        self._endings = ExitStack()  # of all that has been started, run last one first
        self._stop_lock = threading.Lock()
        self._stopping = threading.Event()

    # -- life --------------------------------------------------------------------------------------------------

    def start(self, register_timeout_s: float = 30.0) -> None:
        """Load the model, serve, register. Returns once requests can come; raises PdserveError if they cannot."""
        try:
            self._start(register_timeout_s)
        except BaseException:
            self.stop()
            raise

    def _start(self, register_timeout_s: float) -> None:
        config = self.config
        check_cores("engine.cpu_affinity", config.engine.cpu_affinity)
        check_cores("transfer.cpu_affinity", config.transfer.cpu_affinity)
        _set_threads(config.engine.threads)
        # Here, not at the first transfer: it may have to be compiled first.
        logger.info("native code of the KV codecs: %s", native_status())
        runner = self._make_runner(config)
        self.runner = runner
        self.codecs = worker_codecs(config.transfer.calibration, runner.geometry)
        self.engine = Engine(
            runner,
            config.engine,
            self.clock,
            on_pressure=self._revoke,
            max_reserved_fraction=config.transfer.max_reserved_fraction,
            guards=OutputGuards.load(Path(config.engine.model_path), runner.model.vocab_size),
            prefer_swap=config.role is Role.DECODE,
            on_copied=self._wake,
            on_crash=self.crashed,
        )
        self._endings.callback(self._end_engine)
        self._warm_up()
        self.hub = SessionHub(
            welcome=self._welcome(),
            load=self.load,
            cache=self.engine,
            steps=self.engine.last_steps,
            clock=self.clock,
            heartbeat_s=config.heartbeat_s,
            dead_after_s=config.dead_after_s,
            on_crash=self.crashed,
        )
        self.loop = EngineLoop(self.engine, threads=config.engine.threads, cpu_affinity=config.engine.cpu_affinity)
        self.handler = self._make_handler(self)
        self._endings.callback(self.handler.close)
        self.loop.start(self.handler.on_plan, self.handler.on_result, on_crash=self.crashed)
        self._endings.callback(self._end_loop)
        threading.Thread(target=self._watch_progress, name="progress-watch", daemon=True).start()
        self.hub.start(self.handler)
        self._serve()
        self._register(register_timeout_s)
        if self.failed.is_set():
            raise PdserveError(self.problem)
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        logger.info("%s (%s) serves on %s", config.worker_id, config.role.value, self.address)

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and wait until what runs is done and told; True if it is within `timeout_s`."""
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._registration is not None:
            self._registration.drain()
        self.hub.drain()
        deadline = time.monotonic() + timeout_s
        while self.handler.held() or not self.hub.all_told():
            if self.failed.is_set() or time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def stop(self) -> None:
        """End everything that was started, whatever state it is in. Idempotent."""
        with self._stop_lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
        self._endings.close()

    def _end_serving(self) -> None:
        # Streams must be closed before: stop(grace) waits the whole grace while one is open.
        self.hub.close()
        self.handler.end_streams()
        self._server.stop(grace=1.0).wait(timeout=5.0)

    def _end_loop(self) -> None:
        if not self.loop.stop():
            logger.error("the engine loop did not end; a step is stuck")

    def _wake(self) -> None:
        self.loop.wake()  # which there is as soon as there can be copies

    def _end_engine(self) -> None:
        if not self.engine.close():
            logger.error("the swap thread did not end; a copy is stuck")

    def crashed(self, error: BaseException) -> None:
        """A thread without which this worker cannot do its work has ended by `error`."""
        self.fail(f"{threading.current_thread().name} has failed: {type(error).__name__}")

    def _watch_progress(self) -> None:
        """Fail if the engine's loop stands still, so that this worker is not routed to, and is started anew."""
        limit = max(_STUCK_S, 3 * self.config.dead_after_s)
        seen, since = -1, self.clock.now()
        while not self._stopping.wait(0.5):
            progress, now = self._progress(), self.clock.now()
            if progress != seen:
                seen, since = progress, now
            elif now - since > limit and not self.failed.is_set():
                self.fail(f"the engine has made no progress for {limit:g} s")

    def fail(self, problem: str) -> None:
        """This worker can do no more: leave the cluster and drop the sessions, so that routers replay elsewhere."""
        self.problem = problem
        logger.error("%s fails: %s", self.config.worker_id, problem)
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self.failed.set()
        self.hub.close()

    # -- what the parts ask for ----------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        transfers = self.handler.transfers()
        return replace(
            self.engine.load(),
            open_tickets=transfers.open_tickets,
            open_sends=transfers.open_sends,
            transfers=transfers.events,
            progress=self._progress(),
        )

    def _progress(self) -> int:
        return self.loop.looks + self.runner.progress.total(self.runner.geometry.num_layers)

    def _warm_up(self) -> None:
        """Run two small requests before the first real one: the first pays for lazy set-up (about 1 s), the second
        shows how fast tokens are computed here."""
        tokens = min(_WARM_UP_TOKENS, self.engine.max_model_len - 2)
        if tokens < 1:
            return
        for token in range(2):
            key = RequestKey(f"warm-up-{token}", 0)
            spec = RequestSpec(key, (token,) * tokens, SamplingParams(max_tokens=2, temperature=0.0))
            try:
                self.engine.add(spec, SequenceKind.GENERATE)
            except InvalidRequest:  # a pool too small even for this: nothing to warm
                return
            while (plan := self.engine.schedule()) is not None:
                self.engine.apply(plan, self.engine.execute(plan))

    def _revoke(self, ticket_owner: str) -> None:
        self.handler.revoke(ticket_owner)

    def _welcome(self) -> worker_pb2.Welcome:
        engine, dtype = self.config.engine, self.runner.geometry.dtype
        return worker_pb2.Welcome(
            protocol=PROTOCOL_VERSION,
            worker_id=self.config.worker_id,
            worker_incarnation=self.incarnation,
            role=role_to_proto(self.config.role),
            model=model_to_proto(self.runner.model),
            geometry=geometry_to_proto(self.runner.geometry),
            codecs=self.codecs.usable(self.codecs.fitting(dtype), dtype),
            transports=self._transports(),
            max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
            max_num_seqs=engine.scheduler.max_num_seqs,
        )

    def _transports(self) -> tuple[str, ...]:
        """Ways for KV that this worker has and may use; a worker that takes no part in transfers has none."""
        if self.config.role is Role.AGGREGATED:
            return ()
        available = available_transports()
        if self.config.encrypted_kv:
            available = tuple(name for name in available if name not in PLAINTEXT_TRANSPORTS)
        return may_use(self.config.transfer.transport, available)

    def _serve(self) -> None:
        affinity = self.config.transfer.cpu_affinity
        self._server = grpc.server(
            futures.ThreadPoolExecutor(
                max_workers=_MAX_STREAMS,
                thread_name_prefix="grpc",
                # Receiving KV beside the step loop costs least from another core.
                initializer=lambda: os.sched_setaffinity(0, affinity) if affinity else None,
            ),
            interceptors=self.internal.interceptors(),
            options=SERVER_OPTIONS,
        )
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.hub, self._server)
        self._add_services(self._server)
        host, port = self.config.host, self.config.port
        try:
            bound = self.internal.add_port(self._server, f"{host}:{port}")
        except RuntimeError as error:
            raise was_refused("worker.port", host, port) from error
        self.address = f"{host}:{bound}"
        self._endings.callback(self._end_serving)
        self._server.start()

    def _register(self, timeout_s: float) -> None:
        if not self.config.controller:
            return
        description = membership_pb2.WorkerDescription(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            role=role_to_proto(self.config.role),
            address=self.address,
            model=model_to_proto(self.runner.model),
            geometry=geometry_to_proto(self.runner.geometry),
            pid=os.getpid(),
            native_code=native_status(),
            transports=self._transports(),
        )
        self._registration = Registration(
            controller=self.config.controller,
            worker=description,
            heartbeat_s=self.config.heartbeat_s,
            on_refused=lambda words: self.fail(f"the controller refused this worker: {words}"),
            internal=self.internal,
        )
        self._endings.callback(self._registration.stop)
        self._registration.start()
        deadline = time.monotonic() + timeout_s
        while not self._registration.wait_registered(0.1):
            if self.failed.is_set() or time.monotonic() >= deadline:
                raise PdserveError(self.problem or f"no answer from the controller at {self.config.controller}")


def _set_threads(threads: int) -> None:
    """Ray gives actors one OpenMP thread unless told otherwise; the configuration decides instead."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def check_role(config: WorkerConfig, *roles: Role) -> None:
    """Raises ConfigError if the configuration is for another role."""
    if config.role not in roles:
        raise ConfigError("worker.role", config.role.value, " or ".join(role.value for role in roles))
