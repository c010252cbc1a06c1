"""What a worker's load says of its transfers is what its sender or receiver has counted, each under its own name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from decode_worker.handler import DecodeHandler
from kv_transfer.inbound import ReceiverCounters
from kv_transfer.outbound import CodecCounters, LaneCounters, SenderCounters
from pdcore.faults import FaultPoints
from prefill_worker.handler import PrefillHandler

NOBODY = cast(Any, None)


def test_of_a_prefill_worker() -> None:
    counters = SenderCounters(retries=1, failed=2)
    counters.lanes["shm"] = LaneCounters(frames=3, frame_bytes=4, opened=5, failures=6, downgrades=7, moved_frames=8)
    counters.lanes["grpc"] = LaneCounters(frames=9, frame_bytes=10, failures=20, moved_frames=30)
    counters.codecs["bexp-zstd"] = CodecCounters(raw_bytes=60, wire_bytes=40)
    sender = cast(Any, SimpleNamespace(counters=counters, open_sends=11))
    load = PrefillHandler(NOBODY, sender, NOBODY, FaultPoints(""), lambda: None).transfers()
    assert (load.open_tickets, load.open_sends) == (0, 11)
    assert load.events == {
        "frames_retried": 1,
        "sends_failed": 2,
        "lanes_failed": 26,
        "frames_moved": 38,
        "shm_frames": 3,
        "shm_bytes": 4,
        "shm_opened": 5,
        "shm_downgrades": 7,
        "grpc_frames": 9,
        "grpc_bytes": 10,
        "grpc_opened": 0,
        "grpc_downgrades": 0,
        "codec_bexp-zstd_raw_bytes": 60,
        "codec_bexp-zstd_wire_bytes": 40,
    }


def test_of_a_decode_worker() -> None:
    handler = DecodeHandler(NOBODY, NOBODY, FaultPoints(""), wake=lambda: None, address=lambda: "", grants=True)
    assert handler.transfers().events == {}
    counters = ReceiverCounters(rejected=1, failed=2)
    handler.receiver = cast(Any, SimpleNamespace(counters=counters, open_tickets=3))
    load = handler.transfers()
    assert (load.open_tickets, load.open_sends) == (3, 0)
    assert load.events == {"frames_rejected": 1, "tickets_failed": 2}
