"""Several routers, null workers and a real controller on one event loop, over real gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from cluster.membership import MembershipServer
from pdcore.config import RouterConfig
from pdcore.security import InternalSecurity
from protos import membership_pb2, membership_pb2_grpc
from router.client import AsyncClient
from router.service import RouterServer
from security.internal import PLAIN, Internal
from tests.support.null_cluster import until
from tests.support.null_worker import MODEL, NullWorker


async def keep_registered(
    controller: str, worker: membership_pb2.WorkerDescription, every_s: float = 0.2, internal: Internal = PLAIN
) -> None:
    """Hold a worker's registration, and open it again when it breaks. Until cancelled."""
    state = membership_pb2.WORKER_STATE_SERVING
    async with internal.aio_channel(controller, ()) as channel:
        while True:
            call = membership_pb2_grpc.MembershipStub(channel).Register(metadata=internal.metadata)
            try:
                await call.write(membership_pb2.Registration(worker=worker, state=state))
                while True:
                    await asyncio.sleep(every_s)
                    await call.write(membership_pb2.Registration(state=state))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await asyncio.sleep(0.05)


class RouterFleet:
    """Use with `async with`. `routers` and `clients` by number; `workers` by worker id.

    Args:
        count: routers in this process; tests may add others in processes of their own.
        claim_grace_s: of the first controller. options: of RouterConfig; its `security` is the controller's as well.
    """

    def __init__(
        self,
        model_path: Path,
        workers: list[NullWorker],
        *,
        count: int = 2,
        claim_grace_s: float = 0.0,
        **options: object,
    ) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        self.routers: list[RouterServer] = []
        self.clients: list[AsyncClient] = []
        self.model_path = model_path
        self._count = count
        self._claim_grace_s: float | None = claim_grace_s
        self._port = 0
        self.options: dict[str, object] = {
            "heartbeat_s": 0.1,
            "dead_after_s": 3.0,
            "claim_ttl_s": 10.0,
            "grpc_port": 0,
            "http_port": -1,
            **options,
        }
        self._security: InternalSecurity = self.options.get("security", InternalSecurity())  # type: ignore[assignment]
        self._registrations: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RouterFleet:
        await self.start_controller()
        for worker in self.workers.values():
            await worker.start()
            internal = Internal(self._security)
            registration = keep_registered(self.controller.address, worker.description, internal=internal)
            self._registrations.append(asyncio.create_task(registration))
        for number in range(self._count):
            router = RouterServer(self.router_config(number))
            self.routers.append(router)
            await router.start()
            self.clients.append(AsyncClient(router.address))
        await self.connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        for router in self.routers:
            await router.stop()
        for registration in self._registrations:
            registration.cancel()
        await asyncio.gather(*self._registrations, return_exceptions=True)
        for worker in self.workers.values():
            await worker.stop()
        await self.controller.stop()

    def router_config(self, number: int, **options: object) -> RouterConfig:
        return RouterConfig(
            router_id=f"router-{number}",
            model_path=str(self.model_path),
            served_name=MODEL.name,
            controller=self.controller.address,
            **(self.options | options),  # type: ignore[arg-type]
        )

    async def start_controller(self) -> None:
        """The first one, or a new one in the place of one that was stopped, which knows nothing."""
        self.controller = MembershipServer(
            "127.0.0.1",
            self._port,
            dead_after_s=self.options["dead_after_s"],  # type: ignore[arg-type]
            claim_ttl_s=self.options["claim_ttl_s"],  # type: ignore[arg-type]
            claim_grace_s=self._claim_grace_s,
            security=self._security,
        )
        await self.controller.start()
        self._port = int(self.controller.address.rpartition(":")[2])
        self._claim_grace_s = None

    async def connected(self) -> None:
        """Until every router here has a session with every worker, and all are listed."""
        for router in self.routers:
            pool = router._dispatcher.pool
            await until(
                lambda pool=pool: sum(status.connected for status in pool.statuses()) == len(self.workers),
                "sessions with all workers",
            )
        await until(lambda: len(self.controller.routers.members()) >= len(self.routers), "all routers are listed")

    async def empty(self) -> None:
        """Until no worker holds anything."""
        await until(
            lambda: not any(worker.held for worker in self.workers.values()),
            "workers hold nothing: " + str({w.worker_id: list(w.held) for w in self.workers.values()}),
        )
