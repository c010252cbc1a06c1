"""The C attention of decoding sequences against the plain formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import PagedKvCache
from engine.native.attention import DecodeKernel, decode_kernel
from engine.native.library import engine_library
from pdcore.types import KvGeometry

pytestmark = pytest.mark.skipif(engine_library() is None, reason="no compiler, or a CPU without AVX2")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Case:
    """Sequences of these lengths over a cache of random KV, whose unused slots hold NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, group: int, head_dim: int, dtype: str, block: int) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
        blocks = [-(-length // block) for length in lengths]
        self.geometry = KvGeometry("d", 1, kv_heads, head_dim, dtype, block, sum(blocks) + 1)
        self.cache = PagedKvCache(self.geometry)
        self.lengths, self.group = np.array(lengths, np.int32), group
        self.layer = self.cache.slots_of(0)
        self.layer.fill_(torch.nan)
        self.tables = np.zeros((len(lengths), max(blocks) + 2), np.int32)
        order = torch.randperm(sum(blocks), generator=generator).tolist()
        self.kv = []
        for seq, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            table = [order.pop() for _ in range(count)]
            self.tables[seq, :count] = table
            values = torch.randn(1, 2, length, kv_heads, head_dim, generator=generator).to(self.cache.dtype)
            self.cache.scatter(0, table, 0, values)
            self.kv.append(values[0].double())
        width = kv_heads * group * head_dim
        self.q = torch.randn(len(lengths), width + 5, generator=generator)[:, :width]

    def kernel(self, rows: slice = slice(None), window: int | None = None) -> DecodeKernel:
        geometry = self.geometry
        made = decode_kernel(
            self.tables[rows],
            self.lengths[rows],
            kv_heads=geometry.num_kv_heads,
            group=self.group,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks + 1,
            window=window,
        )
        assert made is not None
        return made

    def run(self, rows: slice = slice(None), window: int | None = None) -> torch.Tensor:
        q = self.q[rows]
        out = torch.empty(q.shape)
        self.kernel(rows, window)(self.layer, q, out, self.geometry.head_dim**-0.5)
        return out

    def expected(self, window: int | None = None) -> torch.Tensor:
        geometry, out = self.geometry, []
        for seq, kv in enumerate(self.kv):
            seen = kv[:, -(window or len(kv[0])) :]
            q = self.q[seq].double().view(geometry.num_kv_heads, self.group, geometry.head_dim)
            scores = torch.einsum("hgd,thd->hgt", q, seen[0]) * geometry.head_dim**-0.5
            out.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), seen[1]).reshape(-1))
        return torch.stack(out)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([8, 16, 40, 64, 80, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    block=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 100),
    count=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_formula(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: str,
    block: int,
    window: int | None,
    count: int,
) -> None:
    torch.set_num_threads(count)
    case = Case(lengths, kv_heads, group, head_dim, dtype, block)
    assert torch.allclose(case.run(window=window).double(), case.expected(window), rtol=1e-5, atol=2e-6)


def test_a_sequence_is_the_same_bits_in_every_company() -> None:
    case = Case([70, 1, 33, 16, 200, 5], 3, 3, 64, "bfloat16", 16)
    torch.set_num_threads(1)
    alone = torch.cat([case.run(slice(seq, seq + 1)) for seq in range(6)])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(case.run(), alone)
        assert torch.equal(case.run(slice(2, 5)), alone[2:5])


def test_large_scores_do_not_overflow() -> None:
    case = Case([20, 9], 1, 2, 16, "float32", 8)
    case.q *= 1e4
    assert torch.allclose(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


def test_a_nan_is_not_hidden() -> None:
    case = Case([20, 9], 1, 2, 16, "float32", 8)
    case.q[1, 3] = torch.nan
    out = case.run()
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1, :16]).all()
    assert torch.isfinite(out[1, 16:]).all(), "the other head"


def test_no_kernel_for_heads_that_it_cannot_do() -> None:
    some = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    assert decode_kernel(*some, kv_heads=1, group=1, head_dim=12, block_size=16, num_blocks=2) is None
