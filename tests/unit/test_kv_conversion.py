"""KV from one element type to another, against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.conversion import TORCH_DTYPES, convert
from pdcore.config import convertible
from pdcore.types import DTYPE_BYTES

PAIRS = list(itertools.product(DTYPE_BYTES, repeat=2))


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_as_torch_converts(source: str, target: str, numbers: list[float]) -> None:
    values = torch.tensor(numbers).to(TORCH_DTYPES[source])
    before = values.clone()
    got = convert(values, source, target)
    assert got.dtype == TORCH_DTYPES[target]
    assert torch.equal(got.float().nan_to_num(7.0, 8.0, 9.0), values.to(got.dtype).float().nan_to_num(7.0, 8.0, 9.0))
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8)), "the source was changed"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_survives_widening(dtype: str) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype]).view(4, 2, 64, 16, 8)
    wide = convert(halves, dtype, "float32")
    assert wide.shape == halves.shape
    back = wide.to(halves.dtype)
    number = ~halves.isnan()
    assert torch.equal(back[number].view(torch.int16), halves[number].view(torch.int16))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_exact_means_that_every_number_survives(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(5000, generator=generator) * 1e5).to(TORCH_DTYPES[source])
    survives = torch.equal(convert(values, source, target).double(), values.double())
    assert convertible(source, target, "exact") is survives
    assert convertible(source, target, "rounding")
