"""The C attention of prompts against the plain formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import PagedKvCache
from engine.native.library import engine_library
from engine.native.prefill import PrefillKernel, prefill_kernel
from pdcore.types import KvGeometry

pytestmark = pytest.mark.skipif(engine_library() is None, reason="no compiler, or a CPU without AVX2")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Case:
    """Prompts of these lengths, in a cache of random KV whose unused slots hold NaN; `queries` are the last tokens of
    each, which are computed now."""

    def __init__(
        self, prompts: list[tuple[int, int]], heads: tuple[int, int, int], dtype: str = "float32", block: int = 16
    ) -> None:
        """`prompts`: (length, queries) of each. `heads`: KV heads, query heads for each, and their size."""
        kv_heads, self.group, head_dim = heads
        generator = torch.Generator().manual_seed(sum(length for length, _ in prompts) + head_dim)
        blocks = [-(-length // block) for length, _ in prompts]
        self.geometry = KvGeometry("d", 1, kv_heads, head_dim, dtype, block, sum(blocks) + 1)
        self.cache = PagedKvCache(self.geometry)
        self.layer = self.cache.slots_of(0)
        self.layer.fill_(torch.nan)
        self.lengths = np.array([length for length, _ in prompts], np.int32)
        self.starts = np.cumsum([0, *(queries for _, queries in prompts)]).astype(np.int32)
        self.tables = np.zeros((len(prompts), max(blocks) + 2), np.int32)
        order = torch.randperm(sum(blocks), generator=generator).tolist()
        self.kv = []
        for seq, count in enumerate(blocks):
            table = [order.pop() for _ in range(count)]
            self.tables[seq, :count] = table
            shape = (1, 2, int(self.lengths[seq]), kv_heads, head_dim)
            values = torch.randn(shape, generator=generator).to(self.cache.dtype)
            self.cache.scatter(0, table, 0, values)
            self.kv.append(values[0].double())
        width = kv_heads * self.group * head_dim
        self.q = torch.randn(int(self.starts[-1]), width + 5, generator=generator)[:, :width]

    def kernel(self, seqs: slice = slice(None), window: int | None = None) -> PrefillKernel:
        """Of adjacent sequences."""
        geometry, chosen = self.geometry, range(len(self.lengths))[seqs]
        starts = self.starts[chosen.start : chosen.stop + 1]
        made = prefill_kernel(
            self.tables[seqs],
            self.lengths[seqs],
            starts - starts[0],
            kv_heads=geometry.num_kv_heads,
            group=self.group,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks + 1,
            window=window,
        )
        assert made is not None
        return made

    def run(self, seqs: slice = slice(None), window: int | None = None) -> torch.Tensor:
        q = self.q[self.rows(seqs)]
        out = torch.empty(q.shape)
        self.kernel(seqs, window)(self.layer, q, out, self.geometry.head_dim**-0.5)
        return out

    def rows(self, seqs: slice) -> slice:
        chosen = range(len(self.lengths))[seqs]
        return slice(int(self.starts[chosen.start]), int(self.starts[chosen.stop]))

    def expected(self, window: int | None = None) -> torch.Tensor:
        geometry, out = self.geometry, []
        for seq, kv in enumerate(self.kv):
            q = self.q[self.rows(slice(seq, seq + 1))].double()
            q = q.reshape(len(q), geometry.num_kv_heads, self.group, geometry.head_dim)
            scores = torch.einsum("qhgd,thd->qhgt", q, kv[0]) * geometry.head_dim**-0.5
            tokens = torch.arange(kv.shape[1])
            at = tokens[-len(q) :, None]
            hidden = (tokens > at) | (tokens <= at - (window or 1 << 30))
            weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
            out.append(torch.einsum("qhgt,thd->qhgd", weights, kv[1]).reshape(len(q), -1))
        return torch.cat(out)


def prompts() -> st.SearchStrategy[list[tuple[int, int]]]:
    """Short ones, and some longer than a stretch of keys."""
    length = st.integers(1, 60) | st.integers(250, 600)
    one = length.flatmap(lambda most: st.tuples(st.just(most), st.integers(1, min(most, 100))))
    return st.lists(one, min_size=1, max_size=4)


@given(
    prompts=prompts(),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 8), st.sampled_from([8, 16, 40, 64, 80, 128])),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    block=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 300),
    count=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_equals_the_formula(
    prompts: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: str,
    block: int,
    window: int | None,
    count: int,
) -> None:
    torch.set_num_threads(count)
    case = Case(prompts, heads, dtype, block)
    assert torch.allclose(case.run(window=window).double(), case.expected(window), rtol=1e-5, atol=2e-6)


def test_a_prompt_in_many_pieces() -> None:
    case = Case([(700, 700)], (2, 3, 64), "bfloat16")
    assert torch.allclose(case.run().double(), case.expected(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_a_token_is_the_same_bits_in_every_company_and_chunk(window: int | None) -> None:
    case = Case([(300, 200), (40, 40), (600, 17), (9, 2)], (3, 3, 64), "bfloat16")
    torch.set_num_threads(1)
    alone = torch.cat([case.run(slice(seq, seq + 1), window) for seq in range(4)])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(case.run(window=window), alone)
        assert torch.equal(case.run(slice(1, 3), window), alone[case.rows(slice(1, 3))])
    # The first prompt again, in two chunks: the first of them knows nothing of the second's tokens.
    for tokens in (1, 50, 130):
        chunks = []
        for length, rows in ((100 + tokens, slice(tokens)), (300, slice(tokens, 200))):
            case.lengths = np.array([length], np.int32)
            case.starts = np.array([0, rows.stop - (rows.start or 0)], np.int32)
            q, out = case.q[rows], torch.empty(case.q[rows].shape)
            case.kernel(slice(0, 1), window)(case.layer, q, out, case.geometry.head_dim**-0.5)
            chunks.append(out)
        assert torch.equal(torch.cat(chunks), alone[:200])


def test_blocks_that_no_query_sees_are_not_read() -> None:
    case = Case([(300, 20)], (1, 2, 16), block=16)
    expected = case.expected(window=30)
    nothing = torch.full((1, 2, 240, 1, 16), torch.nan)  # the first query, token 280, sees tokens from 251 on
    case.cache.scatter(0, case.tables[0, :15].tolist(), 0, nothing)
    assert torch.allclose(case.run(window=30).double(), expected, rtol=1e-5, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    case = Case([(300, 20), (9, 9)], (1, 2, 16))
    case.q *= 1e4
    assert torch.allclose(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


def test_a_nan_is_not_hidden() -> None:
    case = Case([(300, 20), (9, 9)], (1, 2, 16))
    case.q[22, 3] = torch.nan
    out = case.run()
    assert torch.isnan(out[22, :16]).all()
    assert torch.isfinite(out[22, 16:]).all(), "the other head"
    assert torch.isfinite(out[torch.arange(29) != 22]).all(), "other tokens"


def test_no_kernel_for_heads_that_it_cannot_do() -> None:
    some = np.zeros((1, 1), np.int32), np.full(1, 2, np.int32), np.array([0, 2], np.int32)
    assert prefill_kernel(*some, kv_heads=1, group=1, head_dim=12, block_size=16, num_blocks=2) is None
    assert prefill_kernel(*some, kv_heads=1, group=1, head_dim=16, block_size=4, num_blocks=2) is None
