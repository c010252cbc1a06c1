"""Two ends of a transfer in one process, over a real transport, and what tests do with them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import torch

from kv_transfer.inbound_lanes import InboundLane
from kv_transfer.lane_board import OutboundLane
from kv_transfer.lanes import ExpectedFrame
from kv_transfer.manifest import TicketRef
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.transport import OpenLink, SendOutcome
from kv_transfer.transports.grpc_push import GrpcPushLink
from pdcore.clock import Clock, MonotonicClock
from pdcore.config import TransferConfig
from pdcore.faults import FaultPoints
from pdcore.types import KvGeometry, KvTicket, KvTransferStats, RequestKey
from protos import kv_pb2, kv_pb2_grpc
from tests.support.kv_store import MemoryKvStore
from worker.grpc_options import SERVER_OPTIONS

WAIT_S = 20.0
"""Bound of every wait: far above what any of them takes."""


@dataclass
class RecordingHost:
    """A `TicketHost` that remembers. `accept`: its answer to commits; `on_commit_hook`: runs inside `on_commit`."""

    accept: bool = True
    on_commit_hook: Callable[[RequestKey], None] | None = None
    commits: list[tuple[RequestKey, tuple[int, ...], KvTransferStats]] = field(default_factory=list)
    releases: list[tuple[RequestKey, str, bool]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def on_commit(self, key: RequestKey, first_tokens: tuple[int, ...], stats: KvTransferStats) -> bool:
        if self.on_commit_hook is not None:
            self.on_commit_hook(key)
        with self.changed:
            if self.accept:
                self.commits.append((key, first_tokens, stats))
            self.changed.notify_all()
        return self.accept

    def on_release(self, key: RequestKey, reason: str, failed: bool) -> None:
        with self.changed:
            self.releases.append((key, reason, failed))
            self.changed.notify_all()

    def ends(self, key: RequestKey) -> int:
        """How often the ticket of `key` ended; anything but one, in the end, is wrong."""
        return sum(item[0] == key for item in (*self.commits, *self.releases))

    def wait_end(self, key: RequestKey) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.ends(key) > 0, WAIT_S), f"the ticket of {key} never ended"


class Tamper(kv_pb2_grpc.KvServicer):
    """Sits before a receiver's servicer and passes every message through `change`."""

    def __init__(
        self, inner: kv_pb2_grpc.KvServicer, change: Callable[[kv_pb2.PushMessage], Iterator[kv_pb2.PushMessage]]
    ) -> None:
        self._inner = inner
        self._change = change

    def Push(self, request_iterator: Any, context: Any) -> Any:
        return self._inner.Push((out for message in request_iterator for out in self._change(message)), context)


def frame_of(message: kv_pb2.PushMessage) -> kv_pb2.KvChunk | kv_pb2.LaneFrame | None:
    """What a message says of a frame, whichever way its bytes go; None if it says nothing of any."""
    match message.WhichOneof("message"):
        case "chunk":
            return message.chunk
        case "lane_frame":
            return message.lane_frame
    return None


class Meddler:
    """Changes the bytes of frames on their way, whichever that is.

    Args:
        monkeypatch: undoes it.
        rule: frame index, its try and its bytes (on the stream: those of its first piece) -> as many bytes.

    Attributes:
        tries: frame index and try of every frame that came by, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rule: Callable[[int, int, bytes], bytes]) -> None:
        self._rule = rule
        self._seen: Counter[tuple[TicketRef, int]] = Counter()
        self.tries: list[tuple[int, int]] = []
        arrived = InboundLane.arrived

        def meddled(lane: InboundLane, frame: ExpectedFrame, data: memoryview | None, *, shared: bool) -> None:
            if data is not None:
                data = memoryview(self._change(frame.ref, frame.frame_index, bytes(data)))
            arrived(lane, frame, data, shared=shared)

        monkeypatch.setattr(InboundLane, "arrived", meddled)

    def __call__(self, message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        """For `Pair`'s `change`: what comes on the stream."""
        chunk = message.chunk
        if message.WhichOneof("message") == "chunk" and chunk.offset == 0:
            ref = TicketRef(chunk.ticket.ticket_id, chunk.ticket.generation)
            chunk.data = self._change(ref, chunk.frame_index, chunk.data)
        yield message

    def _change(self, ref: TicketRef, frame_index: int, data: bytes) -> bytes:
        attempt = self._seen[ref, frame_index]
        self._seen[ref, frame_index] += 1
        self.tries.append((frame_index, attempt))
        return self._rule(frame_index, attempt, data)


class Sending:
    """One request on its way: waits for its outcome."""

    def __init__(self) -> None:
        self.outcomes: list[SendOutcome] = []
        self.done = threading.Event()

    def __call__(self, outcome: SendOutcome) -> None:
        self.outcomes.append(outcome)
        self.done.set()

    def wait(self) -> SendOutcome:
        assert self.done.wait(WAIT_S), "the send never ended"
        return self.outcomes[0]


class Pair:
    """A sender and a receiver with their stores. Use as a context manager.

    `crashes`: what their threads died of; a test that wants one clears it, else leaving fails.
    """

    def __init__(
        self,
        source: KvGeometry,
        target: KvGeometry,
        config: TransferConfig,
        *,
        receiver_config: TransferConfig | None = None,
        incarnation: str = "decode-a",
        port: int = 0,
        clock: Clock | None = None,
        change: Callable[[kv_pb2.PushMessage], Iterator[kv_pb2.PushMessage]] | None = None,
        open_link: OpenLink = GrpcPushLink,
    ) -> None:
        self.config = config
        self.source = MemoryKvStore(source)
        self.target = MemoryKvStore(target)
        self.host = RecordingHost()
        self.clock = clock or MonotonicClock()
        self.layers: dict[int, int] = {}
        self.crashes: list[BaseException] = []
        self.receiver, self.server, self.port = self._serve(receiver_config or config, incarnation, port, change)
        self.address = f"127.0.0.1:{self.port}"
        self.sender = KvSender(
            worker_id="prefill-0",
            incarnation="prefill-a",
            store=self.source,
            config=config,
            layers_done=lambda step_id: self.layers.get(step_id, 0),
            clock=self.clock,
            faults=FaultPoints(),
            on_crash=self.crashes.append,
            open_link=open_link,
        )

    def _serve(
        self, config: TransferConfig, incarnation: str, port: int, change: Any
    ) -> tuple[KvReceiver, grpc.Server, int]:
        receiver = KvReceiver(
            worker_id="decode-0",
            incarnation=incarnation,
            store=self.target,
            config=config,
            host=self.host,
            clock=self.clock,
            faults=FaultPoints(),
            on_crash=self.crashes.append,
        )
        server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        servicer = receiver.servicer()
        kv_pb2_grpc.add_KvServicer_to_server(Tamper(servicer, change) if change else servicer, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return receiver, server, bound

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sender.close()
        self.stop_receiver()
        assert self.crashes == []

    def stop_receiver(self) -> None:
        self.receiver.close()
        self.server.stop(None).wait(WAIT_S)

    def blocks(self, store: MemoryKvStore, num_tokens: int, first: int = 0) -> list[int]:
        """A block table for `num_tokens`, scattered over the pool from block `first` on, last block first."""
        count = store.geometry.blocks_for(num_tokens)
        return list(range(first, first + count))[::-1]

    def grant(self, key: RequestKey, num_tokens: int, first: int = 0) -> KvTicket:
        blocks = self.blocks(self.target, num_tokens, first)
        return self.receiver.grant(key, "router-0", num_tokens, blocks, self.address)

    def open(self, key: RequestKey, ticket: KvTicket, first: int = 0) -> Sending:
        sending = Sending()
        self.sender.open(key, ticket, self.blocks(self.source, ticket.num_tokens, first), sending)
        return sending

    def transfer(self, key: RequestKey, num_tokens: int, first_token: int = 5) -> SendOutcome:
        """One whole transfer, everything computed at once."""
        self.source.fill(self.blocks(self.source, num_tokens), num_tokens, seed=num_tokens)
        sending = self.open(key, self.grant(key, num_tokens))
        self.sender.finish(key, first_token)
        outcome = sending.wait()
        assert len(sending.outcomes) == 1
        return outcome

    def lanes(self) -> list[OutboundLane]:
        """The sender's lanes."""
        return [lane for peer in self.sender._peers.peers() for lane in peer.board]

    def assert_equal(self, num_tokens: int, first: int = 0) -> None:
        """The target holds, bit by bit, what the source holds."""
        sent = self.source.read(self.blocks(self.source, num_tokens, first), num_tokens)
        got = self.target.read(self.blocks(self.target, num_tokens, first), num_tokens)
        assert torch.equal(sent.view(torch.uint8), got.view(torch.uint8))


def wait_until(condition: Callable[[], bool]) -> None:
    """Look until `condition` holds, `WAIT_S` at most."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.002)
