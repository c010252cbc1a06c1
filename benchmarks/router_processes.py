"""The processes of a router's measurement: a router in one, null workers in another, load in the one that measures.
In the router's place there can be a relay, which does nothing but pass on.

The workers compute nothing. They speak the real session interface, and as an engine's their decode loop gives every
running request one token a step and reports a step's tokens in one message. When each token was reported is noted.

A child is told what to be in its first line of input, says when it is ready, and answers each line of JSON with one:

    {"ask": "usage"}       -> {"cpu_s": user and system time of the process, by getrusage}
    {"ask": "reported"}    -> {"times": {request id: [seconds on the machine's monotonic clock, by token index]}}

It ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.router_by_hand import BareRelay, ByHand
from pdcore.config import RouterConfig
from pdcore.types import ModelInfo, Role
from protos import generation_pb2_grpc
from router.service import RouterServer
from tests.support.null_worker import NullWorker, _Job
from tests.support.static_membership import StaticMembership

REPOSITORY = Path(__file__).resolve().parents[1]
SERVED_NAME = "null"
HEARTBEAT_S = 0.5


class SteppingWorker(NullWorker):
    """A null worker with an engine's decode loop.

    Args:
        tokens: what it generates, again and again. step_s: between two steps.
    """

    def __init__(self, worker_id: str, role: Role, model: ModelInfo, tokens: list[int], step_s: float) -> None:
        super().__init__(
            worker_id,
            role,
            model=model,
            num_blocks=1 << 22,
            script=lambda _, index: tokens[index % len(tokens)],
            heartbeat_s=HEARTBEAT_S,
        )
        self.reported: dict[str, list[float]] = {}
        self._step_s = step_s
        self._running: list[tuple[_Job, list[float]]] = []
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> NullWorker:
        self._loop = asyncio.create_task(self._steps())
        return await super().start()

    async def stop(self) -> None:  # type: ignore[override]  # a method there as well
        if self._loop is not None:
            self._loop.cancel()
        await self.crash()

    async def _decode(self, job: _Job) -> None:
        self._running.append((job, self.reported.setdefault(job.key.request_id, [])))

    async def _steps(self) -> None:
        due = time.monotonic()
        while True:
            # A step that could not be had in time is left out: what is reported late in one lump is no engine's.
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._step_all()

    def _step_all(self) -> None:
        now = round(time.monotonic(), 6)
        going_on = []
        for job, times in self._running:
            if self.held.get(job.key) is not job:
                continue
            if job.window > 0:
                job.window -= 1
                times.append(now)
                if self._token(job.session, job.request, len(times) - 1):
                    self._release(job)
                    continue
            going_on.append((job, times))
        self._running = going_on


@dataclass(frozen=True)
class _Role:
    reported: Callable[[], object]
    stop: Callable[[], Awaitable[None]]


async def _be_router(order: Mapping[str, Any]) -> _Role:
    router = RouterServer(RouterConfig(**order["config"]))
    await router.start()
    print(json.dumps({"address": router.address, "http_address": router.http_address}), flush=True)
    return _Role(dict, router.stop)


async def _be_relay(order: Mapping[str, Any]) -> _Role:
    """`order`: workers, the addresses of ``prefill-0`` and ``decode-0``."""
    stack = AsyncExitStack()
    addresses = [order["workers"][worker_id] for worker_id in ("prefill-0", "decode-0")]
    prefill, decode = [await stack.enter_async_context(ByHand(address)) for address in addresses]
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(BareRelay(prefill, decode), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)

    async def stop() -> None:
        await server.stop(None)
        await stack.aclose()

    return _Role(dict, stop)


async def _be_workers(order: Mapping[str, Any]) -> _Role:
    """`order`: model, tokens, step_s, and the numbers of prefill and decode workers."""
    model = ModelInfo(**order["model"])
    membership = StaticMembership()
    await membership.start()
    workers: list[SteppingWorker] = []
    for role, count in ((Role.PREFILL, order["prefill"]), (Role.DECODE, order["decode"])):
        for number in range(count):
            workers.append(SteppingWorker(f"{role.value}-{number}", role, model, order["tokens"], order["step_s"]))
    for worker in workers:
        await worker.start()
    membership.set([worker.description for worker in workers])
    addresses = {worker.worker_id: worker.address for worker in workers}
    print(json.dumps({"membership": membership.address, "workers": addresses}), flush=True)

    async def stop() -> None:
        for server in (membership, *workers):
            await server.stop()

    return _Role(lambda: {request: times for worker in workers for request, times in worker.reported.items()}, stop)


async def _serve(order: Mapping[str, Any]) -> None:
    roles = {"router": _be_router, "relay": _be_relay, "workers": _be_workers}
    role = await roles[order["be"]](order)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        if json.loads(line)["ask"] == "usage":
            print(json.dumps({"cpu_s": cpu_s()}), flush=True)
        else:
            print(json.dumps({"times": role.reported()}), flush=True)
    await role.stop()


def cpu_s() -> float:
    """User and system time of this process, all its threads, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Child:
    """One of the processes, from the outside. Use with `with`."""

    def __init__(self, be: str, **order: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.router_processes"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        try:
            self.ready = self._exchange({"be": be, **order})
        except BaseException:
            self.stop()
            raise

    def cpu_s(self) -> float:
        return float(self._exchange({"ask": "usage"})["cpu_s"])

    def reported(self) -> dict[str, list[float]]:
        times: dict[str, list[float]] = self._exchange({"ask": "reported"})["times"]
        return times

    def _exchange(self, line: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise SystemExit("a process of the benchmark has ended; see its messages above")
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def router_child(model_path: Path, membership: str, **options: object) -> Child:
    """A router that follows `membership`. `options`: of `RouterConfig`."""
    config = {
        "router_id": "router-0",
        "model_path": str(model_path),
        "served_name": SERVED_NAME,
        "controller": membership,
        "grpc_port": 0,
        "http_port": -1,
        "max_queue": 100_000,
        "max_running_per_worker": 100_000,
        "max_queued_prefill_tokens": 1 << 30,
        "claim_ttl_s": 120.0,
        "dead_after_s": 60.0,  # nobody dies here, and a busy machine shall not make it look so
        **options,
    }
    return Child("router", config=config)


def relay_child(workers: Mapping[str, str]) -> Child:
    """A relay to the first worker of either pool."""
    return Child("relay", workers=dict(workers))


def workers_child(tokens: list[int], *, prefill: int, decode: int, step_s: float) -> Child:
    model = ModelInfo(SERVED_NAME, "0" * 16, max_model_len=1 << 24, vocab_size=1 << 17, dtype="float32")
    return Child("workers", model=asdict(model), tokens=tokens, prefill=prefill, decode=decode, step_s=step_s)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__)
    uvloop.run(_serve(json.loads(sys.stdin.readline())))  # as routers do
