"""Keeps a router registered with the controller for as long as it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from protos import routers_pb2, routers_pb2_grpc
from router.channels import internal_channel_options
from security.internal import PLAIN, Internal

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 2.0


class RouterRegistration:
    """Holds `Routers.Register` open, and opens it again when it breaks. The router serves on in any case.

    Heartbeats come from the event loop that serves the requests: one that stands still is off the list.

    Args:
        controller: ``host:port``. router: what to register; nothing of it changes.
        heartbeat_s: seconds between signs of life.
        sessions: see `WorkerPool.sessions`, which the controller is told.
        running: how many requests have not ended; it is told that as well.
        on_refused: called with the controller's words if another incarnation of this router has taken its place; no
            more is tried then.
    """

    def __init__(
        self,
        controller: str,
        router: routers_pb2.RouterDescription,
        *,
        heartbeat_s: float,
        max_message_bytes: int,
        on_refused: Callable[[str], None],
        sessions: Callable[[], tuple[int, str]] = lambda: (0, ""),
        running: Callable[[], int] = lambda: 0,
        internal: Internal = PLAIN,
    ) -> None:
        self._controller = controller
        self._router = router
        self._heartbeat_s = heartbeat_s
        self._options = internal_channel_options(max_message_bytes)
        self._internal = internal
        self._on_refused = on_refused
        self._sessions = sessions
        self._running = running
        self._state = routers_pb2.ROUTER_STATE_SERVING
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="router-registration")

    def drain(self) -> None:
        """Tell the controller that this router takes nothing new."""
        self._state = routers_pb2.ROUTER_STATE_DRAINING
        self._changed.set()

    def tell(self) -> None:
        """The sessions have changed: the controller hears of it before the next heartbeat."""
        self._changed.set()

    async def stop(self) -> None:
        """Leave the list. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        backoff, known = self._heartbeat_s, ""
        while True:
            # A channel for each try: certificates may have been renewed since the last one.
            async with self._internal.aio_channel(self._controller, self._options) as channel:
                call = routers_pb2_grpc.RoutersStub(channel).Register(metadata=self._internal.metadata)
                beating = asyncio.ensure_future(self._beat(call))
                try:
                    while isinstance(await call.read(), routers_pb2.RouterRegistrationReply):
                        backoff, known = self._heartbeat_s, ""
                    code, problem = await call.code(), str(await call.details())
                except grpc.aio.AioRpcError as error:
                    code, problem = error.code(), str(error.details())
                finally:
                    beating.cancel()
                    await asyncio.gather(beating, return_exceptions=True)
                    call.cancel()
            if code is grpc.StatusCode.FAILED_PRECONDITION:
                self._on_refused(problem)
                return
            if problem != known:  # once, so that a long absence does not fill the log
                logger.warning("registration with the controller at %s is lost: %s", self._controller, problem)
                known = problem
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _beat(self, call: grpc.aio.StreamStreamCall) -> None:
        """Write until the call ends."""
        message = self._message()
        message.router.CopyFrom(self._router)
        while True:
            await call.write(message)
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            message = self._message()

    def _message(self) -> routers_pb2.RouterRegistration:
        connected, problem = self._sessions()
        return routers_pb2.RouterRegistration(
            state=self._state, connected_workers=connected, problem=problem, running_requests=self._running()
        )
