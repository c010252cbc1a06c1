"""A whole cluster without Ray: worker processes, membership service and router, over real gRPC.

Membership and router run on an event loop in a thread of the test process, workers in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.membership import MembershipServer
from pdcore.config import RouterConfig, WorkerConfig
from pdcore.config_json import to_json
from pdcore.types import Role
from router.service import RouterServer
from tests.support.processes import REPOSITORY, RUN_MODULE, WorkerProcess, eventually
from tests.support.session_client import SessionClient

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, for asyncio servers beside synchronous tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        self.loop.close()


class OtherRouter:
    """One ``python -m router`` process. It ends with this one."""

    def __init__(self, config: RouterConfig, folder: Path) -> None:
        self.address = ""
        path = folder / f"{config.router_id}.json"
        path.write_text(to_json(config))
        self._log = folder / f"{config.router_id}.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUN_MODULE, "router", str(path)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
            )

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        assert self._process.stdout is not None
        bound = threading.Timer(timeout_s, self._process.kill)
        bound.start()
        line = self._process.stdout.readline()
        bound.cancel()
        assert line.startswith("READY "), self._log.read_text()[-3000:]
        self.address = json.loads(line.removeprefix("READY "))["address"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10.0)

    def stop(self) -> None:
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


class LocalCluster:
    """Start with `with`; `address` is the router's.

    Args:
        forked: fork the workers from a process that has imported everything; see `forked_worker`.
        modules: what workers of a role run instead of its own module.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        configs: list[WorkerConfig],
        forked: bool = False,
        modules: Mapping[Role, str] | None = None,
        **router: object,
    ) -> None:
        self.model = model
        self.folder = folder
        self._configs = configs
        self._forked = forked
        self._modules = modules or {}
        self._router_options = router
        self.workers: dict[str, WorkerProcess] = {}
        self._processes: list[OtherRouter] = []

    def __enter__(self) -> LocalCluster:
        self._loop = LoopThread()
        self.membership = MembershipServer(host="127.0.0.1", port=0)
        self._loop.run(self.membership.start())
        for config in self._configs:
            self.workers[config.worker_id] = WorkerProcess(
                replace(config, controller=self.membership.address),
                self.folder,
                forked=self._forked,
                module=self._modules.get(config.role, ""),
            )
        try:
            for worker in self.workers.values():
                worker.begin()
            for worker in self.workers.values():
                worker.wait_ready()
            options: dict[str, Any] = {
                "router_id": "router-0",
                "model_path": str(self.model),
                "served_name": self._configs[0].engine.served_name,
                "controller": self.membership.address,
                "grpc_port": 0,
                "http_port": -1,
                "disaggregate": "always",
            }
            self._options = options | self._router_options
            self.router = RouterServer(RouterConfig(**self._options))
            self._loop.run(self.router.start())
            self.address = self.router.address
            self.wait_connected()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.stop()
        if hasattr(self, "router"):
            self._loop.run(self.router.stop())
        for worker in self.workers.values():
            worker.stop()
        self._loop.run(self.membership.stop())
        self._loop.close()

    def start_router(self, router_id: str) -> OtherRouter:
        """One more router, in a process of its own, that has a session with every worker."""
        process = OtherRouter(RouterConfig(**(self._options | {"router_id": router_id})), self.folder)
        self._processes.append(process)
        process.wait_ready()
        self.wait_connected(address=process.address)
        return process

    def wait_connected(self, timeout_s: float = 60.0, address: str = "") -> None:
        """Until a router has a session with the present incarnation of every running worker."""
        import grpc

        from protos import admin_pb2, admin_pb2_grpc

        wanted = {w.incarnation for w in self.workers.values() if w.running}
        with grpc.insecure_channel(address or self.address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)

            def connected() -> bool:
                status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30.0)
                return wanted <= {w.worker.incarnation for w in status.workers if w.connected}

            eventually(connected, timeout_s, f"sessions with all of {sorted(self.workers)}", interval_s=0.05)

    def of_role(self, role: Role) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.config.role is role]

    def probe(self, worker: WorkerProcess) -> SessionClient:
        """A second router's session, only to read the worker's load."""
        return SessionClient(worker.address)

    def assert_baseline(self, timeout_s: float) -> None:
        """Every running worker's blocks are free, and nothing waits, runs or travels, within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with ExitStack() as stack:
            # All at once: each waits for its worker's next report.
            probes = [(w, stack.enter_context(self.probe(w))) for w in self.workers.values() if w.running]
            for worker, probe in probes:

                def at_rest(probe: SessionClient = probe) -> bool:
                    load = probe.load
                    return load is not None and (
                        load.free_blocks == load.total_blocks
                        and not load.waiting + load.running + load.paused
                        and not load.open_tickets + load.open_sends
                    )

                left = max(0.0, deadline - time.monotonic())
                try:
                    probe.wait(at_rest, left, f"{worker.config.worker_id} back at its baseline")
                except AssertionError as error:
                    raise AssertionError(f"{error}\nlast load: {probe.load}") from None
