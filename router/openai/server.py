"""The HTTP server of a router: uvicorn on the router's own event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn

from pdcore.config import RouterConfig
from pdcore.listening import OTHER_PORT, cannot_listen
from router.api_keys import Door
from router.calls import Calls
from router.metrics import RouterMetrics
from router.openai.app import make_app
from router.openai.connection import Connection
from router.openai.face import Face
from router.openai.handshakes import Handshakes

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle: longer than the proxies and clients in front of it keep theirs."""
SEND_BUFFER_BYTES = 64 << 10
"""Of the kernel, for each connection, which doubles it. Its own choice grows to megabytes: for thousands of tokens
the router would not see that a client reads nothing."""
_BACKLOG = 2048


class HttpServer:
    """Listens, and serves the paths of `router.openai.app`.

    ::

        new --start--> serving --stop--> stopped

    Draining is the calls' matter: they refuse new requests, and answers say ``connection: close``.

    Args:
        serving: whether a request can be routed.
        tls: of the connections; None for plain text.
    """

    def __init__(
        self,
        config: RouterConfig,
        calls: Calls,
        door: Door,
        metrics: RouterMetrics,
        *,
        serving: Callable[[], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = ""
        self._config = config
        face = Face(
            calls,
            door,
            metrics,
            served_name=config.served_name,
            serving=serving,
            max_body_bytes=config.max_message_bytes,
        )
        self.app = make_app(face)
        settings = uvicorn.Config(
            self.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=config.max_connections,  # kept by `Connection`
            backlog=_BACKLOG,
        )
        settings.load()
        self._server = uvicorn.Server(settings)
        self._server.servers = []
        self._tls = tls
        self._handshakes: Handshakes | None = None
        self._server.lifespan = settings.lifespan_class(settings)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and set `address` (``host:port``). Raises ConfigError if the port is taken."""
        listener = listen(self._config.host, self._config.http_port)
        port = listener.getsockname()[1]
        if self._tls is None:
            await self._server.startup(sockets=[listener])
        else:
            self._handshakes = Handshakes(listener, self._connection, self._tls)
            self._handshakes.start()
        # Keeps the date of the responses; nothing ever tells it to exit.
        self._ticking = asyncio.create_task(self._server.main_loop(), name="router-http")
        self.address = f"{self._config.host}:{port}"

    def _connection(self) -> Connection:
        """As uvicorn makes one."""
        server = self._server
        return Connection(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)

    async def stop(self, grace_s: float) -> None:
        """Answers that are being written get `grace_s` seconds, then every connection ends. Idempotent."""
        ticking, self._ticking = self._ticking, None
        if ticking is None:
            return
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        state = self._server.server_state
        for server in self._server.servers:
            server.close()
        if self._handshakes is not None:
            await self._handshakes.stop()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=grace_s)
        for task in list(state.tasks):
            task.cancel()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=grace_s)
        for connection in list(state.connections):
            connection.transport.abort()
        for server in self._server.servers:
            await server.wait_closed()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises CannotListen, which names the address, if there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise cannot_listen("router.http_port", host, port, error, OTHER_PORT) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen("router.http_port", host, port, error, OTHER_PORT) from error
    listener.setblocking(False)
    return listener
