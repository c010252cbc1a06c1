"""A router and null workers on one event loop, over real gRPC."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pdcore.classes import OTHERS, TenantLimits
from pdcore.config import RouterConfig
from pdcore.security import ClientTls
from pdcore.types import Role
from router.client import AsyncClient
from router.service import RouterServer
from tests.support.null_worker import MODEL, NullWorker
from tests.support.static_membership import StaticMembership


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition; AssertionError if it does not come."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


COUNTED = (TenantLimits(OTHERS, max_concurrent=1 << 20),)
"""Limits that nobody reaches, so that tenants' running requests are counted."""


def tasks() -> Counter[str]:
    """What this loop's tasks run, and how many run it."""
    return Counter(getattr(task.get_coro(), "__qualname__", repr(task)) for task in asyncio.all_tasks())


class NullCluster:
    """Use with `async with`. `workers` by worker id; `client` talks to the router.

    Args:
        model_path: folder with a tokenizer. client_tls: of `client`. options: of RouterConfig; its `security` is
            the membership's as well.
    """

    def __init__(
        self, model_path: Path, workers: list[NullWorker], *, client_tls: ClientTls | None = None, **options: object
    ) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        self.membership = StaticMembership(security=options.get("security"))  # type: ignore[arg-type]
        self._client_tls = client_tls
        self._model_path = model_path
        self._options: dict[str, object] = {
            "heartbeat_s": 0.1,
            "dead_after_s": 3.0,
            "grpc_port": 0,
            "http_port": -1,
            "disaggregate": "always",
        }
        self._options |= options

    async def __aenter__(self) -> NullCluster:
        await self.membership.start()
        for worker in self.workers.values():
            await worker.start()
        self.announce()
        config = RouterConfig(
            router_id="router-0",
            model_path=str(self._model_path),
            served_name=MODEL.name,
            controller=self.membership.address,
            **self._options,  # type: ignore[arg-type]
        )
        self.router = RouterServer(config)
        await self.router.start()
        self.client = AsyncClient(self.router.address, tls=self._client_tls)
        await self.connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.router.stop()
        for worker in self.workers.values():
            await worker.stop()
        await self.membership.stop()

    def __getitem__(self, worker_id: str) -> NullWorker:
        return self.workers[worker_id]

    def announce(self) -> None:
        """Set the member list to the present workers."""
        self.membership.set([worker.description for worker in self.workers.values()])

    async def connected(self) -> None:
        """Until the router has a session with every worker."""
        pool = self.dispatcher.pool

        def all_up() -> bool:
            up = {status.worker.incarnation for status in pool.statuses() if status.connected}
            return up == {worker.incarnation for worker in self.workers.values()}

        await until(all_up, "sessions with all workers")

    @property
    def dispatcher(self):  # type: ignore[no-untyped-def]
        return self.router._dispatcher

    async def replace(self, worker: NullWorker) -> None:
        """A new incarnation of a worker takes the place of the old one."""
        self.workers[worker.worker_id] = await worker.start()
        self.announce()

    async def empty(self) -> None:
        """Until no worker holds anything."""
        await until(
            lambda: not any(worker.held for worker in self.workers.values()),
            "workers hold nothing: " + str({w.worker_id: list(w.held) for w in self.workers.values()}),
        )

    def left(self) -> dict[str, object]:
        """What the router still has of its clients' requests and connections, by where; empty if it is at rest.

        Tenants are counted only if they have limits: `COUNTED`.
        """
        calls, claims, http, inference = (
            getattr(self.router, name) for name in ("_calls", "_claims", "_http", "_inference")
        )
        admission = self.dispatcher.admission
        book = admission.tenants
        found: dict[str, object] = {
            "requests": list(self.dispatcher.request_ids),
            "calls": [call.request_id for call in calls._running],
            "calls that are prepared": [call.request_id for call in calls._preparing],
            "ids that are shared": list(calls._shared),
            "names of inference requests": list(inference._names),
            "claims": [claim.request_id for claim in (*claims._asking.values(), *claims._live.values())],
            "claims that are given back": len(claims._releases),
            "tenants": {
                tenant: state.running for tenant, state in (book._named | book._rest).items() if state.running
            },
            "open requests of classes": +admission._open,
            "health watchers": self.router._health.watchers,
        }
        if http is not None:
            found["HTTP connections"] = len(http._server.server_state.connections)
            found["HTTP tasks"] = len(http._server.server_state.tasks)
        return {where: what for where, what in found.items() if what}

    async def at_rest(self, running: Counter[str]) -> None:
        """Until nothing is left anywhere. `running`: the `tasks` there were before anything was asked for."""
        await self.empty()
        for _ in range(2000):
            left: object = self.left() or tasks() - running
            if not left:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind: {left}")


def pair(**options: object) -> list[NullWorker]:
    """One prefill and one decode worker, `p0` and `d0`."""
    return [
        NullWorker("p0", Role.PREFILL, **options),  # type: ignore[arg-type]
        NullWorker("d0", Role.DECODE, **options),  # type: ignore[arg-type]
    ]
