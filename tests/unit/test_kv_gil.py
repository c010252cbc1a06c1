"""The bulk of receiving lets the engine's threads run: nothing that grows with a frame's size holds the GIL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.kv_cache import PagedKvCache
from kv_transfer.checksum import crc32
from kv_transfer.codecs.registry import STANDARD
from kv_transfer.frames import FrameLimits, decode_header
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.packing import pack_frame, unpack_frame
from kv_transfer.staging import private_copy
from pdcore.types import KvGeometry, RequestKey

GEOMETRY = KvGeometry("abc123", 32, 8, 128, "bfloat16", 16, 17)
TOKENS = 256
BLOCKS = list(range(16))[::-1]
LIMITS = FrameLimits.for_ticket(
    ref=TicketRef(0, 1),
    key=RequestKey("r", 0),
    geometry=GEOMETRY,
    token_start=0,
    token_end=TOKENS,
    codecs=("raw", "bexp-zstd"),
)
SPAN = FrameSpan(0, GEOMETRY.num_layers, 0, TOKENS)
TRIES = 25


def longest_wait(operation: Callable[[], object]) -> float:
    """For how much of an operation another thread was kept from running at a stretch, at most; a share of 1."""
    begin, end = threading.Event(), threading.Event()

    def run() -> None:
        begin.wait()
        operation()
        end.set()

    thread = threading.Thread(target=run)
    thread.start()
    begin.set()
    started = last = time.perf_counter()
    longest = 0.0
    while not end.is_set():
        time.sleep(0.0002)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return longest / (time.perf_counter() - started)


def lets_others_run(operation: Callable[[], object]) -> bool:
    """A busy machine keeps a thread waiting too, but not each time; the GIL would."""
    return any(longest_wait(operation) < 0.4 for _ in range(TRIES))


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    shape = (GEOMETRY.num_layers, 2, TOKENS, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_a_held_gil_would_be_noticed() -> None:
    """`bytes.translate` holds it, and takes long."""
    data = bytes(64 << 20)
    table = bytes(range(256))
    assert not any(longest_wait(lambda: data.translate(table)) < 0.4 for _ in range(5))


def test_copying_out_of_a_ring() -> None:
    data = np.ones(256 << 20, np.uint8).data
    assert lets_others_run(lambda: private_copy(data))


def test_checksums() -> None:
    data = bytes(512 << 20)
    assert lets_others_run(lambda: crc32(data))


@pytest.mark.parametrize("codec", ["raw", "bexp-zstd"])
def test_decoding(values: torch.Tensor, codec: str) -> None:
    frame = memoryview(pack_frame(values, LIMITS, SPAN, STANDARD[codec]).data)
    header = decode_header(frame, LIMITS)
    assert lets_others_run(lambda: unpack_frame(frame, header))


def test_gather_and_scatter(values: torch.Tensor) -> None:
    cache = PagedKvCache(GEOMETRY)
    assert lets_others_run(lambda: cache.scatter(0, BLOCKS, 0, values))
    assert lets_others_run(lambda: cache.gather(0, GEOMETRY.num_layers, BLOCKS, 0, TOKENS))
