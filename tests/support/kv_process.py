"""One end of a KV transfer in a process of its own: to be killed, or to be weighed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from pdcore.clock import MonotonicClock
from pdcore.config import TransferConfig
from pdcore.faults import FaultPoints
from pdcore.types import KvGeometry, KvTicket, RequestKey
from protos import kv_pb2_grpc
from tests.contract.harness import RecordingHost, Sending
from tests.support.kv_store import MemoryKvStore
from worker.grpc_options import SERVER_OPTIONS

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.kv_process"])


class KvProcess:
    """A child process; calls of its end's methods by name. Use as a context manager.

    Args:
        end: `SendingEnd` or `ReceivingEnd`, made in the child with `arguments`.
    """

    def __init__(self, end: Callable[..., Any], *arguments: object) -> None:
        self._pipe, child = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(child, end, arguments), daemon=True)
        self._process.start()
        child.close()

    def __enter__(self) -> KvProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def call(self, name: str, *arguments: object, timeout_s: float = 60.0) -> Any:
        self.start(name, *arguments)
        return self.result(timeout_s)

    def start(self, name: str, *arguments: object) -> None:
        """A call whose `result` is fetched later."""
        self._pipe.send((name, arguments))

    def result(self, timeout_s: float = 60.0) -> Any:
        assert self._pipe.poll(timeout_s), "the child does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(30.0)


def _serve(pipe: Connection, end: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    served = end(*arguments)
    while True:
        try:
            name, values = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(getattr(served, name)(*values))


class _End:
    """What both ends have: a store, and a memory that can be weighed."""

    def __init__(self, geometry: KvGeometry) -> None:
        self.store = MemoryKvStore(geometry)
        self.store.cache.fill_(1.0)  # its pages are there before anything is weighed

    def reset_peak(self) -> int:
        """Forget the highest resident memory so far; returns the present one, in bytes."""
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak(self) -> int:
        """The highest resident memory since `reset_peak`, in bytes."""
        return self._status("VmHWM")

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise AssertionError(field)

    def _blocks(self, num_tokens: int) -> list[int]:
        return list(range(self.store.geometry.blocks_for(num_tokens)))

    def digest(self, num_tokens: int) -> float:
        """Something that the KV of both ends has in common."""
        values = self.store.read(self._blocks(num_tokens), num_tokens).double()
        return float((values * torch.arange(1, 1 + values.shape[2]).view(1, 1, -1, 1, 1)).sum())


class SendingEnd(_End):
    """A prefill worker's end."""

    def __init__(self, geometry: KvGeometry, config: TransferConfig) -> None:
        super().__init__(geometry)
        self._sendings: dict[RequestKey, Sending] = {}
        self._sender = KvSender(
            worker_id="prefill-0",
            incarnation="prefill-a",
            store=self.store,
            config=config,
            layers_done=lambda step_id: 0,
            clock=MonotonicClock(),
            faults=FaultPoints(),
        )

    def fill(self, num_tokens: int, seed: int) -> None:
        self.store.fill(self._blocks(num_tokens), num_tokens, seed)

    def open(self, key: RequestKey, ticket: KvTicket) -> None:
        self._sendings[key] = Sending()
        self._sender.open(key, ticket, self._blocks(ticket.num_tokens), self._sendings[key])

    def computed(self, key: RequestKey, token_end: int) -> None:
        self._sender.computed(key, token_end)

    def finish(self, key: RequestKey) -> str | None:
        """All of it; returns what went wrong."""
        self._sender.finish(key, 5)
        error = self._sendings[key].wait().error
        return None if error is None else str(error)

    def lanes(self) -> dict[str, int]:
        """Frames sent, by transport."""
        return {name: lane.frames for name, lane in self._sender.counters.lanes.items()}


class ReceivingEnd(_End):
    """A decode worker's end. `scatter_s`: how long a scatter takes at least."""

    def __init__(self, geometry: KvGeometry, config: TransferConfig, scatter_s: float = 0.0) -> None:
        super().__init__(geometry)
        if scatter_s:
            self.store.on_scatter = lambda layer, token: time.sleep(scatter_s)
        self._host = RecordingHost()
        self._receiver = KvReceiver(
            worker_id="decode-0",
            incarnation="decode-a",
            store=self.store,
            config=config,
            host=self._host,
            clock=MonotonicClock(),
            faults=FaultPoints(),
        )
        server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        kv_pb2_grpc.add_KvServicer_to_server(self._receiver.servicer(), server)
        self._address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self._server = server

    def grant(self, key: RequestKey, num_tokens: int) -> KvTicket:
        return self._receiver.grant(key, "router-0", num_tokens, self._blocks(num_tokens), self._address)

    def frames(self) -> int:
        return self._receiver.counters.frames

    def transport_of(self, key: RequestKey) -> str:
        """How the KV of a request came; waits for its commit."""
        self._host.wait_end(key)
        return next(stats.transport for committed, _, stats in self._host.commits if committed == key)
