"""What is read from a model's attention calls, and refused in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.models.transformers_attention import AttentionCall, MaskRule
from engine.models.transformers_probe import Recorder
from pdcore.errors import UnsupportedModel

Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rule(visible: Visible) -> MaskRule:
    return MaskRule(lambda _batch, _head, query, key: visible(query, key))


CAUSAL = rule(lambda query, key: key <= query)


def call(
    layer: int = 0, *, mask: object = CAUSAL, kv_heads: int = 2, size: int = 8, value_size: int = 8
) -> AttentionCall:
    heads = torch.ones(1, 4, 3, size)
    keys, values = torch.ones(1, kv_heads, 3, size), torch.ones(1, kv_heads, 3, value_size)
    return AttentionCall(layer, heads, keys, values, mask, 0.5, None, ())


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (CAUSAL, None),
        (rule(lambda query, key: (key <= query) & (key > query - 7)), 7),
        (rule(lambda query, key: (key <= query) & (key > query - 1)), 1),
        (rule(lambda query, key: (key <= query) & (key > query - 40)), 40),  # more than half of the longest sequence
        (rule(lambda query, key: (key <= query) & (key > query - 64)), None),  # no sequence outgrows it
    ],
)
def test_windows_are_read_from_the_masks(mask: MaskRule, window: int | None) -> None:
    recorder = Recorder(max_len=64)
    assert not recorder.attend(call(mask=mask)).any()
    ((shape, found),) = [(layer.shape, layer.window) for layer in recorder.layers(1)]
    assert found == window
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.score_scale) == (4, 2, 8, 0.5)


@pytest.mark.parametrize(
    "mask",
    [
        rule(lambda query, key: key >= 0),  # in both directions
        rule(lambda query, key: (key <= query) & (key // 16 == query // 16)),  # in chunks
        rule(lambda query, key: (key <= query) & (key // 31 == query // 31)),
        rule(lambda query, key: (key <= query) & ((key > query - 7) | (key < 2))),  # and the first ones
        torch.zeros(1, 1, 3, 3),
        None,
    ],
)
def test_other_masks_are_refused(mask: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"masking functions|other positions"):
        Recorder(max_len=64).attend(call(mask=mask))


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "0 of its 2 layers"),
        ([call(0)], "1 of its 2 layers"),
        ([call(1), call(0)], "in order"),
        ([call(0), call(0), call(1)], "each once"),
        ([call(0), call(1, kv_heads=1)], "shape of K and V differs"),
    ],
)
def test_every_layer_must_keep_the_same_kind_of_kv(calls: list[AttentionCall], reason: str) -> None:
    recorder = Recorder(max_len=64)
    for one in calls:
        recorder.attend(one)
    with pytest.raises(UnsupportedModel, match=reason):
        recorder.layers(2)


def test_values_of_another_size_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="keys of 8 and values of 4 numbers"):
        Recorder(max_len=64).attend(call(value_size=4))
