"""The linear layer that oneDNN computes: right for every number of rows, and given few different ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.linear import Linear, _PackedLinear
from engine.row_sizes import padded_rows


@given(rows=st.integers(0, 1 << 20))
def test_the_padded_number_holds_the_rows_and_is_its_own(rows: int) -> None:
    size = padded_rows(rows)
    assert rows <= size <= rows + rows // 8
    assert padded_rows(size) == size
    assert padded_rows(rows + 1) >= size


def test_there_are_few_numbers() -> None:
    """What is compiled for each number of rows stays in a worker's memory: this is the bound on it."""
    for most, sizes in ((16, 16), (128, 40), (512, 56), (4096, 80)):
        assert len({padded_rows(rows) for rows in range(1, most + 1)}) == sizes
        assert padded_rows(most) == most, "a full budget of tokens must not be padded"


@pytest.fixture(scope="module")
def layer() -> tuple[Linear, torch.Tensor, torch.Tensor]:
    """A packed one with its weight [40, 24] and bias."""
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1))
    layer = Linear(weight, bias)
    if not isinstance(layer._product, _PackedLinear):
        pytest.skip("oneDNN has no layout for float32 on this CPU")
    return layer, weight, bias


@given(rows=st.integers(0, 200), with_residual=st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_exact_arithmetic(
    layer: tuple[Linear, torch.Tensor, torch.Tensor], rows: int, with_residual: bool
) -> None:
    linear, weight, bias = layer
    x, residual = torch.randn(rows, 24), torch.randn(rows, 40)
    before = residual.clone()
    got = linear.add_to(residual, x) if with_residual else linear(x)
    exact = x.double() @ weight.double().T + bias.double() + (residual.double() if with_residual else 0)
    assert got.shape == (rows, 40)
    assert got.is_contiguous()
    bound = 1e-6 * (x.abs().double() @ weight.abs().double().T + 4)
    assert torch.all((got.double() - exact).abs() <= bound)
    assert torch.equal(residual, before)


def test_onednn_sees_few_numbers_of_rows(
    layer: tuple[Linear, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles a product for every number that it sees and keeps it: a worker once grew by gigabytes so."""
    seen: set[tuple[int, ...]] = set()
    multiply = _PackedLinear._multiply

    def watched(
        self: _PackedLinear, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        out = multiply(self, x, bias, residual)
        seen.add((len(x), len(out), len(x) if residual is None else len(residual)))
        return out

    monkeypatch.setattr(_PackedLinear, "_multiply", watched)
    linear = layer[0]
    for rows in range(1, 513):
        linear(torch.zeros(rows, 24))
        linear.add_to(torch.zeros(rows, 40), torch.zeros(rows, 24))
    assert seen == {(size, size, size) for size in map(padded_rows, range(1, 513))}
    assert len(seen) == 56
