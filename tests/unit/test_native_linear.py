"""The C linear layer against exact arithmetic, and its promise that a row does not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.linear import Linear
from engine.native.linear import NarrowLinear, narrow_linear

KERNEL = narrow_linear(torch.zeros(1, 1))
pytestmark = pytest.mark.skipif(KERNEL is None, reason="no compiler, or a CPU without AVX2")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer_of(out: int, size: int, seed: int = 0) -> tuple[torch.Tensor, NarrowLinear]:
    weight = torch.randn(out, size, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    layer = narrow_linear(weight)
    assert layer is not None
    return weight, layer


@given(
    rows=st.integers(0, 20),
    out=st.integers(1, 100),
    size=st.integers(1, 70),
    bias=st.booleans(),
    residual=st.booleans(),
    count=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_equals_exact_arithmetic(rows: int, out: int, size: int, bias: bool, residual: bool, count: int) -> None:
    torch.set_num_threads(count)
    weight, layer = layer_of(out, size, rows)
    x, b, r = torch.randn(rows, size), torch.randn(out), torch.randn(rows, out)
    got = layer(x, b if bias else None, r if residual else None)
    exact = x.double() @ weight.double().T + (b.double() if bias else 0) + (r.double() if residual else 0)
    assert got.shape == (rows, out)
    bound = 1e-6 * (x.abs().double() @ weight.abs().double().T + 4)
    assert torch.all((got.double() - exact).abs() <= bound)


@pytest.mark.parametrize(("out", "size"), [(960, 576), (576, 1536), (49, 64)])
def test_a_row_is_the_same_bits_in_every_company(out: int, size: int) -> None:
    _, layer = layer_of(out, size)
    x = torch.randn(23, size)
    torch.set_num_threads(1)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for rows in range(1, len(x) + 1):
            assert torch.equal(layer(x[:rows]), alone[:rows]), (count, rows)


def test_rows_may_lie_apart_and_columns_too() -> None:
    weight, layer = layer_of(33, 40)
    wide = torch.randn(9, 100)
    assert torch.equal(layer(wide[:, 10:50]), layer(wide[:, 10:50].contiguous()))
    turned = torch.randn(40, 9).T
    assert torch.equal(layer(turned), layer(turned.contiguous()))
    spread = torch.randn(33, 9).T
    assert torch.equal(layer(turned, None, spread), layer(turned, None, spread.contiguous()))
    assert weight.shape == (33, 40)


def test_special_numbers_go_through() -> None:
    weight = torch.tensor([[1.0, 0.0], [float("inf"), 1.0], [-0.0, float("nan")]])
    layer = narrow_linear(torch.nan_to_num(weight, nan=2.0, posinf=float("inf")))
    assert layer is not None
    got = layer(torch.tensor([[3.0, float("nan")], [3.0, 0.5]]))
    assert torch.isnan(got[0, 2])
    assert got[1].tolist() == [3.0, float("inf"), 1.0]


def test_weights_that_are_no_bfloat16_are_left_to_onednn() -> None:
    weight = torch.randn(8, 8)
    assert narrow_linear(weight) is None
    x = torch.randn(3, 8)
    assert torch.allclose(Linear(weight, None)(x), x @ weight.T, atol=1e-6)


def test_the_layer_uses_it() -> None:
    weight, layer = layer_of(64, 48)
    bias, x, residual = torch.randn(64), torch.randn(5, 48), torch.randn(5, 64)
    linear = Linear(weight, bias)
    assert torch.equal(linear(x), layer(x, bias))
    assert torch.equal(linear.add_to(residual, x), layer(x, bias, residual))
