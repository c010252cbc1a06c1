"""Follows the controller's list of workers, and outlives the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import grpc

from pdcore.clock import Clock, MonotonicClock
from pdcore.tracebacks import wordless
from protos import membership_pb2, membership_pb2_grpc, routers_pb2
from router.channels import internal_channel_options
from security.internal import PLAIN, Internal

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
"""The controller repeats its list every few seconds; after this long without one the stream is given up."""
REJOIN_S = 10.0
"""A controller that came back has an empty list until the workers have registered again. Those it does not list yet
stay members for this long."""
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

Members = Mapping[str, membership_pb2.Member]


class MembershipWatcher:
    """Calls `on_members` with the members by worker id, at once and after every list from the controller.

    ::

        connecting --first list--> following --stream ends, or silence--> connecting (after a backoff)
                                                  the last list stays valid

    Args:
        address: ``host:port`` of the controller. watcher_id: name of this router.

    Attributes:
        routers: in the last list; routers need each other for nothing, but people ask.
    """

    def __init__(
        self,
        address: str,
        watcher_id: str,
        on_members: Callable[[Members], None],
        *,
        max_message_bytes: int = 16 << 20,
        rejoin_s: float = REJOIN_S,
        clock: Clock | None = None,
        internal: Internal = PLAIN,
    ) -> None:
        self.routers: Sequence[routers_pb2.RouterMember] = ()
        self._address = address
        self._watcher_id = watcher_id
        self._on_members = on_members
        self._options = internal_channel_options(max_message_bytes)
        self._internal = internal
        self._rejoin_s = rejoin_s
        self._clock = clock or MonotonicClock()
        self._members: dict[str, membership_pb2.Member] = {}
        self._merge_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="membership")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        backoff = MIN_BACKOFF_S
        while True:
            lists = 0
            try:
                # A channel for each try: certificates may have been renewed since the last one.
                async with self._internal.aio_channel(self._address, self._options) as channel:
                    lists = await self._follow(membership_pb2_grpc.MembershipStub(channel))
                problem = "the controller ended the stream" if lists else "no list from the controller"
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except Exception as error:
                # A list that cannot be used must not end the watch.
                logger.exception("membership: a list could not be applied", exc_info=wordless(error))
                problem = "a list could not be applied"
            # Quiet once the controller is known to be away, so that a long absence does not fill the log.
            if lists or backoff < MAX_BACKOFF_S:
                logger.warning("membership: %s; keeping %d members", problem, len(self._members))
            backoff = MIN_BACKOFF_S if lists else min(MAX_BACKOFF_S, 2 * backoff)
            await asyncio.sleep(backoff)

    async def _follow(self, stub: membership_pb2_grpc.MembershipStub) -> int:
        """Read one stream to its end; returns how many lists came."""
        request = membership_pb2.WatchRequest(watcher_id=self._watcher_id)
        call = stub.Watch(request, metadata=self._internal.metadata)
        lists = 0
        try:
            while True:
                try:
                    # Not wait_for: before Python 3.12 it loses a cancellation that comes with a result.
                    async with asyncio.timeout(SILENCE_S):
                        update = await call.read()
                except TimeoutError:
                    return lists
                if not isinstance(update, membership_pb2.MemberList):
                    # The end of the stream; its status raises if it is an error.
                    if (code := await call.code()) is not grpc.StatusCode.OK:
                        raise grpc.aio.AioRpcError(
                            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                        )
                    return lists
                if lists == 0 and self._members:
                    self._merge_until = self._clock.now() + self._rejoin_s
                lists += 1
                self._apply(update)
        finally:
            call.cancel()

    def _apply(self, update: membership_pb2.MemberList) -> None:
        members = {member.worker.worker_id: member for member in update.members}
        if self._clock.now() < self._merge_until:
            members = self._members | members
        self._members = members
        self.routers = tuple(update.routers)
        self._on_members(members)
