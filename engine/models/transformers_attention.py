"""Attention that `transformers`' own modelling code calls, with K and V in a paged cache.

The function that is registered with transformers keeps no state. Whoever runs a model passes a context as a keyword
argument of the model's forward; the modelling code hands it on to each layer's attention call, where the context does
the work: `PagedStep` in a step, others when a model is loaded.
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
    """Passed to a model's forward as ``pdserve_context``."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The output of a layer's attention: [1, T, heads, value_dim]."""
        ...


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
    pdserve_context: AttentionContext | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    if pdserve_context is None:
        raise UnsupportedModel(f"{name} is not handed what the model's forward is called with")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{name} does not know which layer it belongs to")
    changing = tuple(sorted(key for key, setting in options.items() if _matters(key, setting)))
    call = AttentionCall(layer, query, key, value, attention_mask, scaling, softcap, changing)
    return pdserve_context.attend(call), None


def _matters(option: str, setting: object) -> bool:
    if option == "is_causal":
        return setting is False
    return setting is not None and setting is not False and option not in _HARMLESS


def _mask_rule(*, mask_function: object, **_options: object) -> MaskRule:
    return MaskRule(mask_function)


def _token_rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] -> [T, heads * dim]."""
    return heads[0].transpose(0, 1).reshape(heads.shape[2], -1)
