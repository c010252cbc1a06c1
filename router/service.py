"""The router as a server: its parts put together, started and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdcore.addresses import grpc_address, http_address
from pdcore.clock import Clock, MonotonicClock
from pdcore.config import RouterConfig
from pdcore.errors import ConfigError
from pdcore.listening import OTHER_PORT, was_refused
from pdcore.security import PublicTls
from protos import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    open_inference_pb2_grpc,
    routers_pb2,
)
from router.admin_service import AdminService
from router.api_keys import Door
from router.calls import Calls
from router.channels import connection_limits, public_server_options
from router.claims import Claims
from router.dispatcher import Dispatcher
from router.generation_service import GenerationService
from router.guard import Guard
from router.health import OVERALL, POOLS, Health, states_of
from router.key_file import KeyFile
from router.membership import MembershipWatcher
from router.metrics import RouterMetrics
from router.open_inference import OPEN_TO_ALL as INFERENCE_PROBES
from router.open_inference import SERVICE as INFERENCE
from router.open_inference import OpenInferenceService
from router.reflection import SERVICES as REFLECTION
from router.reflection import serve_reflection
from router.registration import RouterRegistration
from router.tokenizer import TextModel
from security.credentials import public_files, server_credentials
from security.files import Renewing
from security.http import server_context
from security.internal import Internal

if TYPE_CHECKING:
    from router.openai.server import HttpServer

logger = logging.getLogger(__name__)

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
OPEN_TO_ALL = (HEALTH, *REFLECTION, *INFERENCE_PROBES)
"""Services and methods that need no API key."""
PUBLIC_SHARE = 1 / 16
"""Of all calls that there may be, what each of these methods may have."""

STOP_GRACE_S = 0.5
QUIET_S = 0.25
"""Calls that are on their way when a server stops are lost. So it stops when none has come for so long ..."""
MAX_NOTICE_S = 5.0
"""... or after this, since clients may be told where to go for ever."""


class RouterServer:
    """One router. All of it runs on the event loop on which `start` is called.

    ::

        new --start--> serving --drain--> draining --stop--> stopped
                          '--------------stop--------------'

    Draining, it refuses new requests with `Draining`, is NOT_SERVING for whoever watches its health, and is listed so
    by the controller; once clients have turned away it stops listening and sends GOAWAY on every connection, which
    stays for the streams that run and ends with the last.

    Args:
        on_replaced: called with the controller's words if another incarnation of this router has taken its place; it
            had better stop then, for the two would take the workers' sessions from each other.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock | None = None,
        on_replaced: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self._internal = Internal(config.security)
        self.address = ""
        self.http_address = ""
        self.incarnation = uuid.uuid4().hex
        self._clock = clock or MonotonicClock()
        self._health = Health((OVERALL, GENERATION, INFERENCE, ADMIN, *POOLS))
        self._changed = asyncio.Event()
        self._dispatcher = Dispatcher(
            config,
            self._clock,
            incarnation=self.incarnation,
            on_change=self._changed.set,
            internal=self._internal,
        )
        self._watcher = MembershipWatcher(
            config.controller,
            config.router_id,
            self._dispatcher.pool.on_members,
            max_message_bytes=config.max_message_bytes,
            clock=self._clock,
            internal=self._internal,
        )
        self._claims = Claims(config, self.incarnation, self._clock, self._dispatcher.abandon, self._internal)
        self._on_replaced = on_replaced or self._log_replaced
        self._registration: RouterRegistration | None = None
        self._text_model: TextModel | None = None
        self.metrics: RouterMetrics | None = None
        self._calls: Calls | None = None
        self._inference: OpenInferenceService | None = None
        self._guard: Guard | None = None
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._going_away: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the tokenizer, listen, and begin to follow the members.

        Sets `address` and `http_address` (``host:port``; the latter stays empty without HTTP).

        Raises:
            ModelError: no usable tokenizer in `model_path`. ConfigError: a port is taken, or the file of API keys
                is not one, or the certificates or the chat template are not right.
        """
        config = self.config
        path = config.api_keys_file
        key_file = await asyncio.to_thread(KeyFile, Path(path)) if path else None
        certificates = None if config.tls is None else public_files(config.tls)
        self._text_model = await asyncio.to_thread(
            TextModel.load,
            Path(config.model_path),
            config.tool_call_parser,
            chat_template=config.chat_template,
            default_max_tokens=config.default_max_tokens,
        )
        calls = self._calls = Calls(config, self._dispatcher, self._text_model, self._claims, self._clock)
        self.metrics = RouterMetrics(config.router_id, config.served_name, self._dispatcher, calls.metrics)
        door = Door(None if key_file is None else key_file.keys)
        generation = GenerationService(calls, door)
        max_public = max(1, round(config.max_calls * PUBLIC_SHARE))
        guard = self._guard = Guard(door, OPEN_TO_ALL, for_admins=(ADMIN,), max_public=max_public)
        server = grpc.aio.server(
            interceptors=(guard,),
            options=(*public_server_options(config.max_message_bytes), *connection_limits(config)),
            maximum_concurrent_rpcs=config.max_calls,
        )
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, server)
        admin = AdminService(
            config, self._dispatcher, lambda: self._watcher.routers, self._clock, lambda: self.http_address
        )
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        inference = self._inference = OpenInferenceService(
            calls, door, config.served_name, lambda: self._health.serving(INFERENCE)
        )
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, server)
        serve_reflection(server, (GENERATION, INFERENCE, ADMIN, HEALTH))
        wanted = f"{config.host}:{config.grpc_port}"
        try:
            port = _add_port(server, wanted, config.tls, certificates)
        except RuntimeError as error:
            self._text_model.close()
            await server.stop(None)
            raise was_refused("router.grpc_port", config.host, config.grpc_port, OTHER_PORT) from error
        if config.http_port >= 0:
            try:
                self._http = await self._start_http(calls, door, self.metrics, certificates)
            except ConfigError:
                self._text_model.close()
                await server.stop(None)
                raise
        self._claims.start()
        await server.start()
        self._server = server
        self.address = f"{config.host}:{port}"
        self._watcher.start()
        self._registration = self._register(calls)
        self._tasks = [
            asyncio.create_task(self._follow_health(), name="router-health"),
            asyncio.create_task(calls.watch_stalls(), name="router-stalls"),
        ]
        if key_file is not None:
            self._tasks.append(asyncio.create_task(key_file.watch(door), name="router-keys"))
        logger.info(
            "router %s serves %s on %s%s",
            config.router_id,
            config.served_name,
            grpc_address(self.address, tls=config.tls is not None),
            f", HTTP on {http_address(self.http_address, tls=config.tls is not None)}" if self.http_address else "",
        )

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests (UNAVAILABLE), let the others finish, then cancel what is left.

        Args:
            timeout_s: None takes the configured one.

        Returns:
            Whether every request finished by itself, and its client has it all.
        """
        timeout_s = self.config.drain_timeout_s if timeout_s is None else timeout_s
        ends = self._clock.now() + timeout_s
        self._dispatcher.begin_drain()
        if self._registration is not None:
            self._registration.drain()
        self._health.close()
        if self._inference is not None:
            self._inference.drain()
        if self._going_away is None:
            self._going_away = asyncio.create_task(self._go_away(timeout_s), name="router-goes-away")
        drained = await self._dispatcher.drain(timeout_s)
        if self._calls is not None:
            drained = await self._calls.finished(max(STOP_GRACE_S, ends - self._clock.now())) and drained
        await asyncio.wait([self._going_away])
        return drained

    async def _go_away(self, timeout_s: float) -> None:
        """Once it is quiet, stop listening and tell every connection to end with its streams."""
        if self._guard is not None and self._server is not None:
            await self._guard.arrivals.quiet(QUIET_S, min(MAX_NOTICE_S, timeout_s / 2))
            stopping = self._server.stop(timeout_s + STOP_GRACE_S)
            self._stopping = asyncio.create_task(stopping, name="router-server-stops")

    async def stop(self) -> None:
        """End everything at once: running requests with UNAVAILABLE, sessions, server. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self._dispatcher.begin_drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._watcher.stop()
        self._health.close()
        if self._going_away is not None:
            self._going_away.cancel()
        await self._dispatcher.stop()
        if self._registration is not None:
            await self._registration.stop()
        # Calls that were just ended get their status out; those of other services are cut off after it.
        await asyncio.gather(
            server.stop(STOP_GRACE_S), *([] if self._http is None else [self._http.stop(STOP_GRACE_S)])
        )
        if self._stopping is not None:
            await self._stopping
        await self._claims.stop()
        if self._text_model is not None:
            self._text_model.close()
        logger.info("router %s has stopped", self.config.router_id)

    async def _start_http(
        self, calls: Calls, door: Door, metrics: RouterMetrics, certificates: Renewing | None
    ) -> HttpServer:
        from router.openai.server import HttpServer  # pydantic comes with it, which nothing else of a router needs

        tls = self.config.tls
        context = None if tls is None or certificates is None else server_context(tls, certificates)
        http = HttpServer(
            self.config, calls, door, metrics, serving=lambda: self._health.serving(OVERALL), tls=context
        )
        await http.start()
        self.http_address = http.address
        return http

    def _register(self, calls: Calls) -> RouterRegistration:
        config = self.config
        router = routers_pb2.RouterDescription(
            router_id=config.router_id,
            incarnation=self.incarnation,
            address=self.address,
            pid=os.getpid(),
            http_address=self.http_address,
            tls=config.tls is not None,
        )
        registration = RouterRegistration(
            config.controller,
            router,
            heartbeat_s=config.heartbeat_s,
            max_message_bytes=config.max_message_bytes,
            on_refused=self._on_replaced,
            sessions=self._dispatcher.pool.sessions,
            running=lambda: calls.running,
            internal=self._internal,
        )
        registration.start()
        return registration

    def _log_replaced(self, words: str) -> None:
        logger.error("router %s is not wanted any more: %s", self.config.router_id, words)

    async def _follow_health(self) -> None:
        while True:
            self._changed.clear()
            if self._registration is not None:
                self._registration.tell()
            before = self._health.serving(OVERALL)
            fleet = self._dispatcher.pool.fleet()
            self._health.set(states_of(fleet, by_workers=(GENERATION, INFERENCE), always=(ADMIN,)))
            serving = self._health.serving(OVERALL)
            if serving != before:
                logger.info("router %s is %s", self.config.router_id, "ready" if serving else "not ready")
            await self._changed.wait()


def _add_port(server: grpc.aio.Server, address: str, tls: PublicTls | None, certificates: Renewing | None) -> int:
    """Let the server listen on ``host:port``; returns the port. Raises RuntimeError if it cannot."""
    if tls is None or certificates is None:
        port: int = server.add_insecure_port(address)
    else:
        credentials = server_credentials(certificates, mutual=bool(tls.client_ca_file))
        port = server.add_secure_port(address, credentials)
    return port
