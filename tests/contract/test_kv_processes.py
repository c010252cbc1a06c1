"""Ends of a transfer in processes of their own: killed in the middle, and weighed while the other one is slow."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pdcore.config import TransferConfig
from pdcore.errors import TransferError
from pdcore.types import KvGeometry, RequestKey
from tests.contract.harness import Pair, wait_until
from tests.support.kv_process import KvProcess, ReceivingEnd, SendingEnd
from tests.support.kv_store import small_geometry

KEY = RequestKey("r", 0)


def config_of(transport: str, **changes: object) -> TransferConfig:
    values: dict[str, object] = {"frame_bytes": 16384, "message_bytes": 4096, "credit_bytes": 65536}
    return TransferConfig(**{**values, "transport": transport, **changes})  # type: ignore[arg-type]


def traces() -> list[str]:
    """What a lane could leave in this process or behind it: mappings, files, threads, names of shared memory."""
    found = [name for name in os.listdir("/dev/shm") if "pdserve" in name]
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "pdserve-kv" in line]
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found += [target] if "pdserve-kv" in target else []
    return found + [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-lane")]


def test_a_sender_that_is_killed_leaves_nothing(transport: str) -> None:
    with (
        Pair(small_geometry(), small_geometry(block_size=32), config_of(transport)) as pair,
        KvProcess(SendingEnd, small_geometry(), config_of(transport)) as sender,
    ):
        sender.call("open", KEY, pair.grant(KEY, 400))
        sender.call("computed", KEY, 256)
        wait_until(lambda: pair.receiver.counters.frames == 3)
        assert sender.call("lanes") == {transport: 3}
        sender.kill()
        pair.host.wait_end(KEY)
        assert pair.host.releases[0][2], "its ticket has failed"
        wait_until(lambda: pair.receiver.counters.buffered_bytes == 0)
        wait_until(lambda: traces() == [])
        assert pair.transfer(RequestKey("r", 1), 400).error is None
        pair.assert_equal(400)


def test_a_receiver_that_is_killed_leaves_nothing(transport: str) -> None:
    with (
        Pair(small_geometry(), small_geometry(), config_of(transport)) as pair,
        KvProcess(ReceivingEnd, small_geometry(), config_of(transport), 0.05) as receiver,
    ):
        sending = pair.open(KEY, receiver.call("grant", KEY, 900))
        pair.sender.finish(KEY, 5)
        wait_until(lambda: pair.sender.counters.frames >= 4)
        receiver.kill()
        error = sending.wait().error
        assert isinstance(error, TransferError)
        assert error.retryable
        wait_until(lambda: pair.sender.open_sends == 0)
        assert pair.sender.counters.unacked_bytes == 0
        wait_until(lambda: traces() == [])
        assert pair.transfer(RequestKey("r", 1), 400).error is None


def test_a_slow_receiver_costs_neither_end_memory(transport: str) -> None:
    """Many times the credit passes while the receiver is the slow end; neither grows by more than a few credits."""
    geometry = KvGeometry("abc123", 8, 2, 64, "bfloat16", 16, 512)
    credit = 1 << 20
    config = TransferConfig(transport=transport, codec="raw", credit_bytes=credit)
    tokens = 8192
    with (
        KvProcess(ReceivingEnd, geometry, config, 0.004) as receiver,
        KvProcess(SendingEnd, geometry, config) as sender,
    ):
        sender.call("fill", tokens, 1)

        def transfer(attempt: int) -> None:
            key = RequestKey("r", attempt)
            sender.call("open", key, receiver.call("grant", key, tokens))
            assert sender.call("finish", key) is None
            assert receiver.call("transport_of", key) == transport

        transfer(0)  # what is made once is made: the lane, gRPC's buffers, the allocator's arenas
        before = [end.call("reset_peak") for end in (sender, receiver)]
        for attempt in range(1, 4):
            transfer(attempt)
        growth = [end.call("peak") - start for end, start in zip((sender, receiver), before, strict=True)]
        moved = 3 * tokens * geometry.bytes_per_token
        assert moved > 80 * credit
        assert max(growth) < 8 * credit, growth
        assert receiver.call("digest", tokens) == sender.call("digest", tokens)
