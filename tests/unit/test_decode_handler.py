"""What a decode worker makes of a transfer that ends well and does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.handler import DecodeHandler
from pdcore.faults import FaultPoints
from pdcore.types import KvTicket, KvTransferStats, RequestKey
from protos import worker_pb2
from tests.support.engine_kit import make_engine, request
from tests.support.fake_runner import FakeRunner


class News:
    """The reporter of a handler; keeps what it is told."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.forgotten: list[RequestKey] = []

    def notice(self, key: RequestKey, notice: worker_pb2.RequestNotice) -> None:
        if notice.HasField("failed"):
            self.failures.append(notice.failed.code)

    def forget(self, key: RequestKey) -> None:
        self.forgotten.append(key)


@pytest.mark.parametrize("first_tokens", [(), (1, 2), (10**6,), (-1,)])
def test_first_tokens_that_cannot_be_are_a_failure_of_the_transfer(first_tokens: tuple[int, ...]) -> None:
    """Not of the request, which another worker, or this one by itself, can well serve."""
    engine, news = make_engine(FakeRunner()), News()
    handler = DecodeHandler(
        engine, cast(Any, news), FaultPoints(""), wake=lambda: None, address=lambda: "", grants=True
    )
    ticket = KvTicket(num_tokens=40, prefix_tokens=0, lease_s=1.0, codecs=("raw",), endpoints=())
    handler.receiver = cast(Any, SimpleNamespace(grant=lambda *_, **__: ticket))
    spec = request("r", 40, 8)
    handler.reserve("router", spec)
    stats = KvTransferStats(blocks=3, raw_bytes=3, wire_bytes=3, codec="raw", transport="grpc", seconds=0.1)
    assert not handler.on_commit(spec.key, first_tokens, stats)
    assert news.failures == [worker_pb2.FAILURE_CODE_TRANSFER]
    assert news.forgotten == [spec.key]
    # The receiver gives the blocks back as it does for every ticket that is not taken.
    handler.on_release(spec.key, "not taken", failed=False)
    assert engine.load().free_blocks == engine.load().total_blocks
    assert not handler.held()
