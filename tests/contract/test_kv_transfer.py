"""What every transport must do: KV comes out as it went in, whatever the shapes, chunks and codecs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kv_transfer.codecs.registry import STANDARD
from kv_transfer.manifest import TicketRef
from pdcore.config import BLOCK_SIZES, TransferConfig
from pdcore.errors import FrameError, TransferError
from pdcore.types import DTYPE_BYTES, KvEndpoint, KvGeometry, RequestKey
from tests.contract.harness import Pair, Sending, wait_until
from tests.support.kv_store import small_geometry

ODD_LENGTHS = (1, 7, 16, 17, 63, 130, 259)


def config_of(transport: str, **changes: object) -> TransferConfig:
    """Small frames and messages, so that even small caches make several of each."""
    values: dict[str, object] = {"transport": transport, "frame_bytes": 8192, "message_bytes": 4096}
    return TransferConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("target_block", BLOCK_SIZES)
@pytest.mark.parametrize("source_block", BLOCK_SIZES)
def test_block_sizes(transport: str, source_block: int, target_block: int) -> None:
    source, target = small_geometry(block_size=source_block), small_geometry(block_size=target_block)
    with Pair(source, target, config_of(transport)) as pair:
        for tokens in ODD_LENGTHS:
            assert pair.transfer(RequestKey("r", tokens), tokens, first_token=tokens).error is None
            pair.assert_equal(tokens)
        assert [(key.attempt, token) for key, token, _ in pair.host.commits] == [(n, (n,)) for n in ODD_LENGTHS]
        assert pair.host.releases == []
        assert pair.receiver.open_tickets == 0
        assert pair.sender.open_sends == 0


@pytest.mark.parametrize("codec", ["raw", "auto"])
@pytest.mark.parametrize("target", DTYPE_BYTES)
@pytest.mark.parametrize("source", DTYPE_BYTES)
def test_caches_of_different_types(source: str, target: str, codec: str) -> None:
    config = config_of("grpc", codec=codec, kv_conversion="rounding")
    with Pair(small_geometry(dtype=source), small_geometry(dtype=target, block_size=32), config) as pair:
        assert pair.transfer(RequestKey("r", 0), 75).error is None
        sent = pair.source.read(pair.blocks(pair.source, 75), 75)
        got = pair.target.read(pair.blocks(pair.target, 75), 75)
        assert torch.equal(got, sent.to(got.dtype))
        # What was converted is not what this worker would have computed: it must not answer for other prompts.
        assert pair.host.commits[0][2].lossless is (source == target)


@pytest.mark.parametrize(
    ("source", "target", "fits"),
    [("bfloat16", "float32", True), ("float16", "float32", True), ("float32", "bfloat16", False)],
)
def test_rounding_has_to_be_asked_for(source: str, target: str, fits: bool) -> None:
    with Pair(small_geometry(dtype=source), small_geometry(dtype=target), config_of("grpc")) as pair:
        error = pair.transfer(RequestKey("r", 0), 75).error
        assert (error is None) is fits
        assert fits or all(word in str(error) for word in ("kv_conversion", source, target))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("codec", [codec.name for codec in STANDARD if codec.lossless])
def test_codecs_and_dtypes(transport: str, codec: str, dtype: str) -> None:
    source, target = small_geometry(dtype=dtype), small_geometry(dtype=dtype, block_size=32)
    with Pair(source, target, config_of(transport, codec=codec)) as pair:
        for tokens in ODD_LENGTHS:
            assert pair.transfer(RequestKey("r", tokens), tokens).error is None
            pair.assert_equal(tokens)
        _, _, stats = pair.host.commits[-1]
        if dtype in STANDARD[codec].dtypes:
            assert (stats.codec, stats.codec_reason) == (codec, "asked for by the configuration")
        else:
            assert stats.codec_reason.startswith(f"{codec} was asked for and cannot be used here; ")
        assert stats.lossless
        assert stats.raw_bytes == 259 * source.bytes_per_token
        assert stats.blocks == target.blocks_for(259)
        assert (stats.wire_bytes < stats.raw_bytes) == (stats.codec != "raw")
        assert pair.receiver.counters.buffered_bytes == 0
        assert pair.sender.counters.unacked_bytes == 0


def test_sender_and_receiver_prefer_different_codecs(transport: str) -> None:
    raw, compressed = config_of(transport, codec="raw"), config_of(transport)
    with Pair(small_geometry(), small_geometry(), raw, receiver_config=compressed) as pair:
        assert pair.transfer(RequestKey("r", 0), 100).error is None
        pair.assert_equal(100)
        assert pair.host.commits[0][2].codec == "raw"


def test_layers_go_while_the_step_computes(transport: str) -> None:
    geometry = small_geometry(layers=6)
    with Pair(geometry, small_geometry(layers=6, block_size=8), config_of(transport)) as pair:
        pair.source.fill(pair.blocks(pair.source, 150), 150, seed=1)
        key = RequestKey("r", 0)
        sending = pair.open(key, pair.grant(key, 150))
        bounds = [0, 17, 100, 149, 150]  # chunks end inside blocks
        for step, (start, end) in enumerate(pairwise(bounds), start=1):
            pair.sender.computing(key, start, end, step)
            if step == 1:
                before = pair.receiver.counters.frames
                pair.layers[step] = 6
                wait_until(lambda before=before: pair.receiver.counters.frames > before)  # type: ignore[misc]
            for done in range(7):
                pair.layers[step] = done
            pair.sender.computed(key, end)
        pair.sender.finish(key, 9)
        assert sending.wait().error is None
        pair.assert_equal(150)
        assert pair.host.commits[0][2].raw_bytes == 150 * geometry.bytes_per_token


def test_nothing_is_read_before_it_is_computed(transport: str) -> None:
    geometry = small_geometry(layers=4)
    with Pair(geometry, geometry, config_of(transport, frame_bytes=1)) as pair:
        ready = {layer: 0 for layer in range(4)}
        early: list[tuple[int, int]] = []

        def check(layer: int, token: int) -> None:
            if token >= ready[layer]:
                early.append((layer, token))

        pair.source.on_gather = check
        key = RequestKey("r", 0)
        sending = pair.open(key, pair.grant(key, 64))
        pair.sender.computing(key, 0, 40, 1)
        pair.sender.computing(key, 40, 64, 2)
        for done in range(1, 5):
            ready[done - 1] = 40
            pair.layers[1] = done
            wait_until(lambda done=done: pair.receiver.counters.frames >= done)  # type: ignore[misc]
        pair.sender.computed(key, 40)
        for layer in range(4):
            ready[layer] = 64
        pair.sender.computed(key, 64)
        pair.sender.finish(key, 1)
        assert sending.wait().error is None
        assert early == []


def test_many_at_once_share_one_stream(transport: str) -> None:
    geometry = small_geometry(num_blocks=256)
    with Pair(geometry, small_geometry(num_blocks=256, block_size=32), config_of(transport)) as pair:
        sendings: list[Sending] = []
        lengths = [20 + 13 * number for number in range(8)]
        first = [number * 8 for number in range(8)]
        for number, tokens in enumerate(lengths):
            pair.source.fill(pair.blocks(pair.source, tokens, first[number]), tokens, seed=number)
        for number, tokens in enumerate(lengths):
            key = RequestKey(f"r{number}", 0)
            sendings.append(pair.open(key, pair.grant(key, tokens, first[number]), first[number]))
            pair.sender.finish(key, number)
        assert all(sending.wait().error is None for sending in sendings)
        for number, tokens in enumerate(lengths):
            pair.assert_equal(tokens, first[number])
        assert sorted((key.request_id, token) for key, token, _ in pair.host.commits) == [
            (f"r{number}", (number,)) for number in range(8)
        ]
        assert pair.sender.counters.links == 1


def test_no_frame_is_larger_than_a_token_of_a_layer_needs(transport: str) -> None:
    """The credit is so small that frames must be cut down to fit it."""
    geometry = small_geometry(layers=3)
    config = config_of(transport, codec="raw", credit_bytes=8192, frame_bytes=1 << 20)
    with Pair(geometry, geometry, config) as pair:
        assert pair.transfer(RequestKey("r", 0), 259).error is None
        pair.assert_equal(259)
        assert pair.receiver.counters.peak_stream_bytes <= 8192


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codecs": ("morse",)}, "morse"),
        ({"endpoints": (KvEndpoint("127.0.0.1:1", "pigeon", 0, 2, 0, 1, "x"),)}, "pigeon"),
        ({"endpoints": (KvEndpoint("127.0.0.1:1", "grpc", 1, 1, 0, 1, "x"),)}, "heads"),
        ({"endpoints": ()}, "transport"),
        ({"endpoints": (KvEndpoint("127.0.0.1:1", "grpc", 0, 2, 0, 1, ""),)}, "incarnation"),
        ({"num_tokens": 1 << 20}, "blocks"),
        ({"prefix_tokens": 40}, "tokens"),
    ],
)
def test_a_ticket_that_cannot_be_met_is_refused_at_once(change: dict[str, object], words: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of("grpc")) as pair:
        key = RequestKey("r", 0)
        ticket = pair.grant(key, 40)
        with pytest.raises(TransferError, match=words) as caught:
            pair.sender.open(key, replace(ticket, **change), [0, 1, 2], Sending())  # type: ignore[arg-type]
        assert not caught.value.retryable
        assert pair.sender.open_sends == 0


def test_a_request_is_not_sent_twice_at_once() -> None:
    with Pair(small_geometry(), small_geometry(), config_of("grpc")) as pair:
        key = RequestKey("r", 0)
        ticket = pair.grant(key, 40)
        sending = pair.open(key, ticket)
        with pytest.raises(TransferError, match="already"):
            pair.open(key, ticket)
        pair.sender.finish(key, 1)
        assert sending.wait().error is None


def test_gather_and_scatter_errors_end_the_transfer(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:

        def fail(layer: int, token: int) -> None:
            raise ValueError("the cache says no")

        pair.source.on_gather = fail
        outcome = pair.transfer(RequestKey("r", 0), 40)
        assert isinstance(outcome.error, FrameError)
        assert "gather failed: ValueError" in str(outcome.error), "and nothing of what it says"
        pair.host.wait_end(RequestKey("r", 0))
        pair.source.on_gather = None
        pair.target.on_scatter = fail
        assert "scatter failed: ValueError" in str(pair.transfer(RequestKey("r", 1), 40).error)
        pair.host.wait_end(RequestKey("r", 1))
        pair.target.on_scatter = None
        assert pair.transfer(RequestKey("r", 2), 40).error is None
        assert pair.receiver.counters.buffered_bytes == 0
        assert [pair.host.ends(RequestKey("r", attempt)) for attempt in range(3)] == [1, 1, 1]


def test_ticket_generations_are_never_reused() -> None:
    with Pair(small_geometry(), small_geometry(), config_of("grpc")) as pair:
        refs = set()
        for attempt in range(5):
            key = RequestKey("r", attempt)
            ticket = pair.grant(key, 16)
            (endpoint,) = ticket.endpoints
            refs.add(TicketRef(endpoint.ticket_id, endpoint.generation))
            pair.receiver.release(key, "enough")
            pair.receiver.release(key, "enough")
            pair.host.wait_end(key)
            assert pair.host.ends(key) == 1
        assert len(refs) == 5
        assert len({ref.ticket_id for ref in refs}) == 1


def test_a_receiver_with_less_credit_gets_smaller_frames(transport: str) -> None:
    geometry = KvGeometry("d" * 16, 16, 8, 64, "float32", 16, 64)  # 4 KiB per token and layer
    small = config_of(transport, codec="raw", message_bytes=65536, credit_bytes=262144, frame_bytes=512 * 1024)
    large = TransferConfig(transport=transport, codec="raw")
    with Pair(geometry, geometry, large, receiver_config=small) as pair:
        assert pair.transfer(RequestKey("r", 0), 300).error is None
        pair.assert_equal(300)
