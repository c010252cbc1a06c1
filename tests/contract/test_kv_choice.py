"""The codec of a transfer between two real ends: who decides, what is told, and that a slow link is found out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.manifest import MAX_REASON_CHARS
from pdcore.config import TransferConfig
from pdcore.types import KvTransferStats, RequestKey
from protos import kv_pb2
from tests.contract.harness import Pair, Sending
from tests.support.codec_reasons import codecs_of
from tests.support.kv_store import small_geometry


def config_of(transport: str, codec: str, **changes: object) -> TransferConfig:
    values = {"frame_bytes": 8192, "message_bytes": 4096, **changes}
    return TransferConfig(transport=transport, codec=codec, **values)  # type: ignore[arg-type]


def transfer(pair: Pair, name: str, tokens: int, codec: str = "") -> KvTransferStats:
    """One transfer with everything computed; `codec` as the request asks for it."""
    key = RequestKey(name, 0)
    blocks = pair.blocks(pair.target, tokens)
    ticket = pair.receiver.grant(key, "router-0", tokens, blocks, pair.address, codec=codec)
    pair.source.fill(pair.blocks(pair.source, tokens), tokens, seed=tokens)
    sending = Sending()
    pair.sender.open(key, ticket, pair.blocks(pair.source, tokens), sending, codec)
    pair.sender.finish(key, 5)
    assert sending.wait().error is None
    pair.assert_equal(tokens)
    return pair.host.commits[-1][2]


def test_auto_says_why(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport, "auto")) as pair:
        stats = transfer(pair, "r", 500)
        assert stats.codec in codecs_of(stats.codec_reason)
        assert " exposed, " in stats.codec_reason
        assert "Gbit/s" in stats.codec_reason
        assert len(stats.codec_reason) <= MAX_REASON_CHARS
        assert stats.lossless


def test_the_request_decides_else_the_configuration(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport, "zstd")) as pair:
        configured, asked = transfer(pair, "a", 100), transfer(pair, "b", 100, "raw")
        assert (configured.codec, configured.codec_reason) == ("zstd", "asked for by the configuration")
        assert (asked.codec, asked.codec_reason) == ("raw", "asked for by the request or its class")
        assert transfer(pair, "c", 100, "bexp-zstd").codec == "bexp-zstd"
        assert not transfer(pair, "d", 100, "auto").codec_reason.startswith("asked for")


@pytest.mark.parametrize("asked", ["", "auto", "raw"])
def test_a_ticket_takes_no_lossy_codec_that_nobody_asked_for(asked: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of("grpc", "auto")) as pair:
        ticket = pair.receiver.grant(RequestKey("r", 0), "router-0", 10, [0], pair.address, codec=asked)
        assert set(ticket.codecs) <= {"raw", "zstd", "bexp-zstd", "bexp3"}


def slowed(bytes_s: float) -> Callable[[kv_pb2.PushMessage], Iterator[kv_pb2.PushMessage]]:
    """A way that takes its time for every piece of a frame."""

    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "chunk":
            time.sleep(len(message.chunk.data) / bytes_s)
        yield message

    return change


def test_a_slow_link_is_found_out_and_compressed_for() -> None:
    """Within the first transfer: it begins with what suits the assumed link, and looks again when frames queue."""
    geometry = small_geometry(num_blocks=128)
    config = config_of("grpc", "auto", credit_bytes=64 << 10)
    with Pair(geometry, geometry, config, change=slowed(0.5e6)) as pair:
        stats = transfer(pair, "first", 2000)
        assert "assumed" not in stats.codec_reason
        for name in ("second", "third"):
            stats = transfer(pair, name, 2000)
            assert stats.codec != "raw"
            assert "assumed" not in stats.codec_reason
            assert stats.wire_bytes < 0.9 * stats.raw_bytes
        gbit = float(stats.codec_reason.partition("(")[2].partition(" Gbit/s")[0])
        assert 0.5e6 * 8e-9 / 4 < gbit < 0.5e6 * 8e-9 * 1.5


def test_what_the_receiver_held_and_worked_comes_back() -> None:
    """Its decode speed, as its answers tell it, is what the sender reckons with afterwards."""
    geometry = small_geometry(num_blocks=128)
    with Pair(geometry, geometry, config_of("grpc", "raw")) as pair:
        pair.target.on_scatter = lambda layer, token: time.sleep(0.02)
        transfer(pair, "r", 1000)
        frames = pair.sender.counters.frames
        decode = pair.sender._chooser._decode_of(pair.address)["raw"]
        now = pair.clock.now()
        assert decode.weight(now) > 0.5
        assert decode.value(now) < 1.2 * 1000 * geometry.bytes_per_token / (0.02 * frames)
