"""Connections that have still to become encrypted: so many at once, and none for long.

Until its handshake is over a connection is nobody's: the HTTP server has not seen it, and counts it nowhere, while a
quarter of a megabyte is set aside for it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 256
HANDSHAKE_S = 10.0
"""That a handshake may take."""
LEAST_S = 0.5
"""That it may take when there are `MAX_HANDSHAKES`: then the one that began first gives way to who is waiting."""
_PAUSE_S = 1.0
"""After the system had no place for a connection."""


class Handshakes:
    """Accepts connections, and hands over those that are encrypted.

    ::

        new --start--> accepting --stop--> stopped

    Who comes when there are too many waits in the system's own queue, until one of them is over or has had `LEAST_S`.
    So those who connect and say nothing keep nobody out for long, and a crowd that comes at once is not sent away.

    Args:
        listener: listens, and does not block; closed by `stop`. protocol: makes one for a connection; its
            `connection_made` is called once the handshake is over. context: of TLS.
    """

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._context = context
        self._running: dict[asyncio.Task[None], float] = {}  # when each began; the first one stands first
        self._accepting: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._running)

    def start(self) -> None:
        """Accept connections from now on."""
        self._accepting = asyncio.create_task(self._accept(), name="router-http-accepts")

    async def stop(self) -> None:
        """Accept no more, and cut off what has not got through. Idempotent."""
        tasks = list(self._running)
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionError:
                continue  # it has gone already
            except OSError as error:  # no more files, or no memory
                logger.error("no connection can be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._encrypt(connection), name="router-http-handshake")
            self._running[task] = loop.time()
            task.add_done_callback(self._running.pop)
            while len(self._running) >= MAX_HANDSHAKES:
                await self._make_room()

    async def _encrypt(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # of the network, of TLS, or of time
            logger.debug("a connection did not become encrypted: %s", error)

    async def _make_room(self) -> None:
        """Until a handshake is over; the first one is cut off once it has had its least time."""
        first, began = next(iter(self._running.items()))
        left = began + LEAST_S - asyncio.get_running_loop().time()
        done: set[asyncio.Task[None]] = set()
        if left > 0:
            done, _ = await asyncio.wait(self._running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            first.cancel()
            await asyncio.wait([first])
