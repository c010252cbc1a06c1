"""A membership service whose list is set by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from pdcore.security import InternalSecurity
from protos import membership_pb2, membership_pb2_grpc, routers_pb2, routers_pb2_grpc
from security.internal import Internal


class _Anybody(routers_pb2_grpc.RoutersServicer):
    """Takes every router's registration, gives it every key, and remembers nothing."""

    async def Register(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass

    async def Claim(self, request: routers_pb2.ClaimRequest, context: object) -> routers_pb2.ClaimReply:
        return routers_pb2.ClaimReply()

    async def Renew(self, request: routers_pb2.RenewClaimsRequest, context: object) -> routers_pb2.RenewClaimsReply:
        return routers_pb2.RenewClaimsReply()

    async def Release(
        self, request: routers_pb2.ReleaseClaimRequest, context: object
    ) -> routers_pb2.ReleaseClaimReply:
        return routers_pb2.ReleaseClaimReply()


class StaticMembership(membership_pb2_grpc.MembershipServicer):
    """Serves `Membership.Watch`; `set` changes the list for all watchers. Routers may register, to no effect,
    and get every key."""

    def __init__(self, port: int = 0, security: InternalSecurity | None = None) -> None:
        self._port = port
        self._internal = Internal(security or InternalSecurity())
        self._members: list[membership_pb2.Member] = []
        self._version = 0
        self._changed = asyncio.Event()
        self.watchers = 0
        self.address = ""

    async def start(self) -> None:
        self._server = grpc.aio.server(
            interceptors=self._internal.aio_interceptors(), options=[("grpc.so_reuseport", 0)]
        )
        membership_pb2_grpc.add_MembershipServicer_to_server(self, self._server)
        routers_pb2_grpc.add_RoutersServicer_to_server(_Anybody(), self._server)
        self._port = self._internal.add_port(self._server, f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self._port}"
        await self._server.start()

    async def stop(self) -> None:
        """Vanish, as a controller that dies."""
        await self._server.stop(0)

    def set(
        self,
        workers: Sequence[membership_pb2.WorkerDescription],
        draining: Sequence[membership_pb2.WorkerDescription] = (),
    ) -> None:
        serving_state, draining_state = membership_pb2.WORKER_STATE_SERVING, membership_pb2.WORKER_STATE_DRAINING
        self._members = [membership_pb2.Member(worker=worker, state=serving_state) for worker in workers]
        self._members += [membership_pb2.Member(worker=worker, state=draining_state) for worker in draining]
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def Watch(self, request: membership_pb2.WatchRequest, context: grpc.aio.ServicerContext) -> None:
        self.watchers += 1
        while True:
            changed = self._changed
            await context.write(membership_pb2.MemberList(version=self._version, members=self._members))
            try:
                await asyncio.wait_for(changed.wait(), 1.0)
            except TimeoutError:
                pass
