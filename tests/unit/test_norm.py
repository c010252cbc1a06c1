"""The root mean square norm against its formula, on both sides of the number of rows where the code changes."""

from __future__ import annotations

import pytest
import torch

from engine.norm import rms_norm


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 65, 100])
@pytest.mark.parametrize("width", [8, 24, 576, 20])
def test_equals_the_formula(rows: int, width: int) -> None:
    wide = torch.randn(rows, width + 3) * 5
    weight = torch.randn(width)
    for x in (wide[:, :width], wide.T[:width].T.contiguous(), torch.randn(width, rows).T):
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = rms_norm(x, weight, 1e-5)
        assert got.shape == (rows, width)
        assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_row_is_the_same_bits_in_every_company() -> None:
    x, weight = torch.randn(9, 576), torch.randn(576)
    alone = torch.cat([rms_norm(x[i : i + 1], weight, 1e-6) for i in range(9)])
    assert torch.equal(rms_norm(x, weight, 1e-6), alone)


def test_other_types_go_to_torch() -> None:
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(16).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (16,), weight, 1e-6))
