"""Attention that `transformers`' own modelling code calls, with K and V in a paged cache.

The function that is registered with transformers keeps no state. The attention modules of a model share a `Slot`,
into which whoever runs the model puts a context for the time of one forward pass. The context answers each layer's
call: `PagedStep` in a step, others when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention import AttentionPlan, HeadShape, attend, write_kv
from engine.kv_cache import PagedKvCache
from engine.step import StepProgress
from pdcore.errors import UnsupportedModel

PAGED = "pdserve_paged"
"""Name of the attention implementation. Models make no masks for it: the plan of a step says who sees what."""
PROBED = "pdserve_probed"
"""The same, but each layer is handed a `MaskRule`."""

_SLOT = "pdserve_slot"
# What else modelling code passes that changes nothing here. `dropout` is for training; windows come from the masks.
_HARMLESS = frozenset({"dropout", "sliding_window", "position_ids", "use_cache", "cache_position", "deterministic"})


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Who sees whom in a layer, as a function of (batch, head, query position, key position), all int64 tensors."""

    visible: Any


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call.

    Attributes:
        query: [1, heads, T, head_dim]. key: [1, kv_heads, T, head_dim]. value: [1, kv_heads, T, value_dim].
        mask: what the modelling code made as a mask. scale, softcap: as in `HeadShape`.
        options: names of other options that are set and may change the result.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: object
    scale: float | None
    softcap: float | None
    options: tuple[str, ...]


class AttentionContext(Protocol):
    """Answers the attention calls of one forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The output of a layer's attention: [1, T, heads, value_dim]."""
        ...


class Slot:
    """Where the attention modules of one model find the context of the running forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Make all modules of `model` that know their layer look here."""
        self.context: AttentionContext | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is the same in every call of a layer. `window` as in `engine.attention`."""

    shape: HeadShape
    window: int | None


class PagedStep:
    """Runs one step's attention over the paged cache.

    Args:
        layers: one for each layer. plans: by window.
        progress: its `layers_done` is raised as each layer's K and V are in `cache`.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        plans: dict[int | None, AttentionPlan],
        cache: PagedKvCache,
        progress: StepProgress,
    ) -> None:
        self._layers, self._plans = layers, plans
        self._cache, self._progress = cache, progress

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._layers[call.layer]
        plan = self._plans[layer.window]
        write_kv(plan, self._cache, call.layer, _token_rows(torch.cat((call.key, call.value), 1)))
        self._progress.layers_done = call.layer + 1
        query = _token_rows(call.query).to(call.value.dtype)  # some models rotate in float32
        mixed = attend(plan, self._cache, call.layer, query, layer.shape)
        return mixed.view(1, -1, layer.shape.num_heads, layer.shape.head_dim)


def register() -> None:
    """Make `PAGED` and `PROBED` known to transformers. May be called again."""
    for name in (PAGED, PROBED):
        AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(PROBED, _mask_rule)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    layer, slot = getattr(module, "layer_idx", None), getattr(module, _SLOT, None)
    if slot is None or not isinstance(layer, int):
        raise UnsupportedModel(f"{type(module).__name__} does not know which layer it belongs to")
    changing = tuple(sorted(key for key, setting in options.items() if _matters(key, setting)))
    call = AttentionCall(layer, query, key, value, attention_mask, scaling, softcap, changing)
    assert slot.context is not None, "nobody runs this model"
    return slot.context.attend(call), None


def _matters(option: str, setting: object) -> bool:
    if option == "is_causal":
        return setting is False
    return setting is not None and setting is not False and option not in _HARMLESS


def _mask_rule(*, mask_function: object, **_options: object) -> MaskRule:
    return MaskRule(mask_function)


def _token_rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] -> [T, heads * dim]."""
    return heads[0].transpose(0, 1).reshape(heads.shape[2], -1)
