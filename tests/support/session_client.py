"""A router's end of a session, by hand: for tests that drive one worker directly."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import grpc

from pdcore.types import PROTOCOL_VERSION, RequestSpec
from protos import worker_pb2, worker_pb2_grpc
from protos.convert import spec_to_proto
from security.internal import PLAIN, Internal
from worker.grpc_options import CHANNEL_OPTIONS


class SessionClient:
    """Opens a session, renews it by heartbeats, and keeps everything that the worker says."""

    def __init__(
        self,
        address: str,
        router_id: str = "",
        *,
        heartbeats: bool = True,
        internal: Internal = PLAIN,
        **hello: object,
    ) -> None:
        self.router_id = router_id or f"test-{uuid.uuid4().hex[:8]}"
        self._commands: queue.SimpleQueue[worker_pb2.SessionCommand | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.welcome: worker_pb2.Welcome | None = None
        self.replies: dict[tuple[str, int], worker_pb2.ReserveReply] = {}
        self.tokens: list[worker_pb2.TokenEvent] = []
        self.notices: list[worker_pb2.RequestNotice] = []
        self.load: worker_pb2.Load | None = None
        self.draining = False
        self.reports = 0
        self.ended: str | None = None
        self.heartbeats = heartbeats
        self._channel = internal.channel(address, CHANNEL_OPTIONS)
        fields: dict[str, object] = {
            "protocol_min": PROTOCOL_VERSION,
            "protocol_max": PROTOCOL_VERSION,
            "router_id": self.router_id,
            "router_incarnation": f"{self.router_id}-1",
        }
        self._commands.put(worker_pb2.SessionCommand(hello=worker_pb2.Hello(**(fields | hello))))
        self._stream = worker_pb2_grpc.WorkerStub(self._channel).Session(self._iterate(), metadata=internal.metadata)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _iterate(self) -> Iterator[worker_pb2.SessionCommand]:
        while True:
            try:
                command = self._commands.get(timeout=0.3)
            except queue.Empty:
                if not self.heartbeats:
                    continue
                command = worker_pb2.SessionCommand(heartbeat=worker_pb2.Heartbeat())
            if command is None:
                return
            yield command

    def _read(self) -> None:
        ended = "closed"
        try:
            for event in self._stream:
                with self._changed:
                    self._take(event)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            ended = f"{error.code().name}: {error.details()}"
        with self._changed:
            self.ended = ended
            self._changed.notify_all()

    def _take(self, event: worker_pb2.SessionEvent) -> None:
        match event.WhichOneof("event"):
            case "welcome":
                self.welcome = event.welcome
            case "reserve":
                self.replies[(event.reserve.request_id, event.reserve.attempt)] = event.reserve
            case "report":
                self.reports += 1
                self.tokens.extend(event.report.tokens)
                self.notices.extend(event.report.notices)
                self.load = event.report.load
                self.draining = event.report.draining

    # -- commands ----------------------------------------------------------------------------------------------

    def reserve(self, spec: RequestSpec, timeout_s: float = 30.0) -> worker_pb2.ReserveReply:
        self.replies.pop((spec.key.request_id, spec.key.attempt), None)
        self._commands.put(worker_pb2.SessionCommand(reserve=worker_pb2.Reserve(request=spec_to_proto(spec))))
        key = (spec.key.request_id, spec.key.attempt)
        self.wait(lambda: key in self.replies, timeout_s, "a reply to reserve")
        return self.replies[key]

    def prefill(self, spec: RequestSpec, ticket: object) -> None:
        command = worker_pb2.Prefill(request=spec_to_proto(spec), ticket=ticket)  # type: ignore[arg-type]
        self._commands.put(worker_pb2.SessionCommand(prefill=command))

    def generate(self, spec: RequestSpec) -> None:
        self._commands.put(worker_pb2.SessionCommand(generate=worker_pb2.Generate(request=spec_to_proto(spec))))

    def abort(self, request_id: str, attempt: int = 0) -> None:
        command = worker_pb2.Abort(request_id=request_id, attempt=attempt, reason="test")
        self._commands.put(worker_pb2.SessionCommand(abort=command))

    def credit(self, request_id: str, tokens: int, attempt: int = 0) -> None:
        credit = worker_pb2.Credit(request_id=request_id, attempt=attempt, tokens=tokens)
        self._commands.put(worker_pb2.SessionCommand(credits=worker_pb2.Credits(credits=[credit])))

    def drain(self) -> None:
        self._commands.put(worker_pb2.SessionCommand(drain=worker_pb2.Drain()))

    # -- what came ---------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {timeout_s} s: {what} (session: {self.ended or 'open'})")
                self._changed.wait(min(left, 0.1))

    def tokens_of(self, request_id: str) -> dict[int, int]:
        """Token ids by index; a repeated index must repeat its token."""
        found: dict[int, int] = {}
        for token in list(self.tokens):
            if token.request_id == request_id:
                assert found.setdefault(token.index, token.token_id) == token.token_id, token
        return found

    def finish_of(self, request_id: str) -> int:
        return next((t.finish for t in list(self.tokens) if t.request_id == request_id and t.finish), 0)

    def wait_finished(self, request_id: str, timeout_s: float = 30.0) -> list[int]:
        self.wait(lambda: self.finish_of(request_id), timeout_s, f"the last token of {request_id}")
        found = self.tokens_of(request_id)
        first = min(found)
        assert sorted(found) == list(range(first, first + len(found)))
        return [found[index] for index in sorted(found)]

    def failure_of(self, request_id: str) -> worker_pb2.RequestFailed | None:
        for notice in list(self.notices):
            if notice.request_id == request_id and notice.WhichOneof("notice") == "failed":
                return notice.failed
        return None

    def fresh_load(self, timeout_s: float = 30.0) -> worker_pb2.Load:
        """A load that was reported after this call."""
        seen = self.reports
        self.wait(lambda: self.reports > seen, timeout_s, "a report")
        assert self.load is not None
        return self.load

    def close(self) -> None:
        self._stream.cancel()
        self._commands.put(None)
        self._channel.close()
        self._reader.join(timeout=5.0)

    def __enter__(self) -> SessionClient:
        self.wait(lambda: self.welcome or self.ended, 10.0, "a welcome")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
