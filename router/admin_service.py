"""What an operator asks a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import grpc

from pdcore.clock import Clock
from pdcore.config import RouterConfig
from pdcore.types import PriorityClass
from protos import admin_pb2, admin_pb2_grpc, routers_pb2, worker_pb2
from protos.convert import model_to_proto
from router.dispatcher import Dispatcher


class AdminService(admin_pb2_grpc.AdminServicer):
    """See admin.proto. `routers`: the list that the controller sent last. `http_address`: of this router."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        routers: Callable[[], Sequence[routers_pb2.RouterMember]],
        clock: Clock,
        http_address: Callable[[], str],
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._routers = routers
        self._clock = clock
        self._http_address = http_address
        self._started = clock.now()

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusReply:
        dispatcher = self._dispatcher
        model = dispatcher.pool.model
        return admin_pb2.GetStatusReply(
            router_id=self._config.router_id,
            uptime_s=self._clock.now() - self._started,
            model=None if model is None else model_to_proto(model),
            draining=dispatcher.draining,
            queued_requests=dispatcher.queued,
            running_requests=dispatcher.running,
            finished_requests=dispatcher.counters.finished,
            failed_requests=dispatcher.counters.failed,
            replays=dispatcher.counters.replays,
            failed_transfers=dispatcher.counters.failed_transfers,
            rebuilds=dispatcher.counters.rebuilds,
            workers=dispatcher.pool.statuses(),
            decisions=[
                admin_pb2.Decision(mode=mode, reason=reason, count=count)
                for (mode, reason), count in dispatcher.counters.decisions.most_common()
            ],
            degraded=dispatcher.pool.degraded,
            routers=self._routers(),
            classes=[self._class_status(priority) for priority in PriorityClass],
            http_address=self._http_address(),
            tls=self._config.tls is not None,
            rate_limited_requests=dispatcher.admission.rate_limited,
        )

    def _class_status(self, priority: PriorityClass) -> admin_pb2.ClassStatus:
        objective = self._config.classes.of(priority)
        counters = self._dispatcher.admission.counters[priority]
        return admin_pb2.ClassStatus(
            name=priority.name.lower(),
            waiting=self._dispatcher.waiting_of(priority),
            max_queue=self._config.max_queue_by_class[priority],
            ttft_ms=objective.ttft_ms,
            itl_ms=objective.itl_ms,
            **asdict(counters),
        )

    async def GetSteps(
        self, request: worker_pb2.GetStepsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetClusterStepsReply:
        return admin_pb2.GetClusterStepsReply(workers=await self._dispatcher.pool.last_steps(request.count))
