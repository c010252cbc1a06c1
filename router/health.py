"""The standard health service (grpc.health.v1), per service and per pool of workers.

grpc's own servicer is not used: there a watcher that leaves takes the news of all others of its service along, and
one that reads nothing holds up whoever sets a state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdcore.errors import Draining
from pdcore.types import Role
from router.fleet import Fleet

OVERALL = ""
POOLS = {f"pool/{role.value}": role for role in Role}
"""Names of the pools: SERVING while one of its workers is connected and takes new requests."""

_STATES = health_pb2.HealthCheckResponse
State = int
"""One of `health_pb2.HealthCheckResponse.ServingStatus`."""


def states_of(fleet: Fleet, by_workers: Sequence[str], always: Sequence[str]) -> dict[str, bool]:
    """Who serves, as long as the router does not drain.

    Args:
        by_workers: services that need a worker to be of use. always: services that answer without any.
    """
    masks = {Role.PREFILL: fleet.prefill, Role.DECODE: fleet.decode, Role.AGGREGATED: fleet.aggregated}
    pools = {name: bool(masks[role].any()) for name, role in POOLS.items()}
    services = dict.fromkeys((OVERALL, *by_workers), not fleet.empty)
    return pools | services | dict.fromkeys(always, True)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """States by name; NOT_SERVING before anything is known. Everything happens on one event loop.

    A watcher is told the state at once and then every change; of several in a row it may miss all but the last.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()
        self._closed = False
        self.watchers = 0

    def set(self, serving: Mapping[str, bool]) -> None:
        """The new state of these names. Of no effect once it is closed."""
        if not self._closed and any(self._serving.get(name) != value for name, value in serving.items()):
            self._serving.update(serving)
            self._tell()

    def close(self) -> None:
        """Nothing is served any more: watchers are told so, and their calls end. Idempotent."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._tell()

    def serving(self, name: str) -> bool:
        return self._serving[name]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _state(self, name: str) -> State | None:
        if name not in self._serving:
            return None
        state: State = _STATES.SERVING if self._serving[name] else _STATES.NOT_SERVING
        return state

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        state = self._state(request.service)
        if state is None:
            known = ", ".join(sorted(repr(name) for name in self._serving))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service of this name; there are {known}")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        self.watchers += 1
        try:
            await self._watch(request.service, context)
        finally:
            self.watchers -= 1

    async def _watch(self, name: str, context: grpc.aio.ServicerContext) -> None:
        told: State | None = None
        while True:
            changed = self._changed
            state = self._state(name) or _STATES.SERVICE_UNKNOWN
            if state != told:
                await context.write(health_pb2.HealthCheckResponse(status=state))
                told = state
            elif self._closed:
                raise Draining("the router is draining")
            else:
                await changed.wait()
