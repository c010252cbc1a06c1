"""The paged cache's canonical view against a plain array of tokens."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from engine.kv_cache import PagedKvCache
from pdcore.types import KvGeometry

LAYERS, HEADS, SIZE = 4, 3, 8


def cache_of(block_size: int = 16, num_blocks: int = 12, dtype: str = "bfloat16") -> PagedKvCache:
    return PagedKvCache(KvGeometry("d", LAYERS, HEADS, SIZE, dtype, block_size, num_blocks))


def random_values(cache: PagedKvCache, layers: int, tokens: int) -> torch.Tensor:
    return torch.randn(layers, 2, tokens, HEADS, SIZE).to(cache.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_gather_returns_what_was_scattered(dtype: str, block_size: int) -> None:
    rng = random.Random(block_size)
    cache = cache_of(block_size, dtype=dtype)
    table = rng.sample(range(12), 6)
    table[2:4] = sorted(table[2:4])
    tokens = 6 * block_size
    oracle = torch.zeros(LAYERS, 2, tokens, HEADS, SIZE, dtype=cache.dtype)
    for _ in range(60):
        start, layer = rng.randrange(tokens), rng.randrange(LAYERS)
        count, layers = rng.randint(1, tokens - start), rng.randint(1, LAYERS - layer)
        values = random_values(cache, layers, count)
        cache.scatter(layer, table, start, values)
        oracle[layer : layer + layers, :, start : start + count] = values
        start = rng.randrange(tokens)
        count = rng.randint(1, tokens - start)
        got = cache.gather(layer, layers, table, start, count)
        assert got.is_contiguous()
        assert torch.equal(got, oracle[layer : layer + layers, :, start : start + count])
    others = [block for block in range(12) if block not in table]
    assert not cache.gather(0, LAYERS, others, 0, len(others) * block_size).any()


def test_bits_survive() -> None:
    """NaN payloads, infinities and negative zero are copied, not converted."""
    cache = cache_of()
    bits = torch.randint(-(2**15), 2**15, (LAYERS, 2, 16, HEADS, SIZE), dtype=torch.int16)
    cache.scatter(0, [3], 0, bits.view(torch.bfloat16))
    assert torch.equal(cache.gather(0, LAYERS, [3], 0, 16).view(torch.int16), bits)


def test_scatter_takes_strided_values() -> None:
    cache = cache_of()
    values = random_values(cache, LAYERS, 20)
    cache.scatter(0, [5, 2], 4, values[:, :, 3:9])
    assert torch.equal(cache.gather(0, LAYERS, [5, 2], 4, 6), values[:, :, 3:9])


def test_backend_views_agree_with_the_canonical_one() -> None:
    cache = cache_of()
    values = random_values(cache, LAYERS, 16)
    cache.scatter(0, [7], 0, values)
    plane = (12 + 1) * 16
    for head in range(HEADS):
        key_rows = cache.slots_of(2)[head * plane + 7 * 16 : head * plane + 8 * 16]
        assert torch.equal(key_rows, values[2, 0, :, head])
        value_block = cache.blocks_of(2)[(HEADS + head) * 13 + 7]
        assert torch.equal(value_block.view(16, SIZE), values[2, 1, :, head])
    assert not cache.blocks_of(2)[cache.zero_block].any()


@pytest.mark.parametrize(
    ("layers", "blocks", "tokens", "message"),
    [
        ((0, 5), [0], (0, 1), "layers"),
        ((-1, 1), [0], (0, 1), "layers"),
        ((0, 0), [0], (0, 1), "layers"),
        ((0, 1), [0], (0, 17), "tokens"),
        ((0, 1), [0], (-1, 2), "tokens"),
        ((0, 1), [0], (3, 0), "tokens"),
        ((0, 1), [12], (0, 1), "block ids"),
        ((0, 1), [-1], (0, 1), "block ids"),
    ],
)
def test_out_of_range_is_refused(
    layers: tuple[int, int], blocks: list[int], tokens: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cache_of().gather(*layers, blocks, *tokens)


def test_values_of_another_shape_or_dtype_are_refused() -> None:
    cache = cache_of()
    good = random_values(cache, 1, 4)
    for bad in (good.float(), good[:, :1], good[..., :4], good[0]):
        with pytest.raises(ValueError, match="values must be"):
            cache.scatter(0, [0], 0, bad)
    heads = cache.geometry.num_kv_heads
    for values, start in ((good, 1), (good[:, :, :, :1], heads), (good[:, :, :, :1], -1), (good[:, :, :, :0], 0)):
        with pytest.raises(ValueError, match="heads"):
            cache.scatter(0, [0], 0, values, start)


def test_a_range_of_heads_is_written_and_no_other() -> None:
    cache = cache_of()
    whole = random_values(cache, cache.geometry.num_layers, 20)
    cache.scatter(0, [3, 1], 0, whole)
    part = random_values(cache, cache.geometry.num_layers, 20)[:, :, :, :1]
    cache.scatter(0, [3, 1], 0, part, 1)
    expected = whole.clone()
    expected[:, :, :, 1:2] = part
    assert torch.equal(cache.gather(0, cache.geometry.num_layers, [3, 1], 0, 20), expected)


def test_copies_let_other_threads_run() -> None:
    """While one thread gathers, this one goes on; a call that held the GIL would freeze the counter."""
    geometry = KvGeometry("d", 8, 8, 64, "bfloat16", 16, 1024)
    cache = PagedKvCache(geometry)
    blocks = list(range(1024))
    done = threading.Event()

    def work() -> None:
        for _ in range(3):
            cache.gather(0, 8, blocks, 0, 1024 * 16)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    ticks = 0
    while not done.is_set():
        ticks += 1
        time.sleep(0)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert ticks > 50
