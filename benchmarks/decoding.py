"""Sequences that decode, as on a decode worker: their KV comes from elsewhere, and nothing is computed first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from engine.engine import Engine
from engine.step import ModelRunner
from pdcore.types import RequestKey, RequestSpec, SamplingParams


def fill_cache(runner: ModelRunner) -> None:
    """Put random numbers into every block, as K and V of whoever is given it."""
    geometry = runner.geometry
    shape = (geometry.num_layers, 2, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = values.to(getattr(torch, geometry.dtype))
    for block in range(geometry.num_blocks):
        runner.cache.scatter(0, [block], 0, values)


def greedy_spec(name: str, prompt: np.ndarray, max_tokens: int, **more: object) -> RequestSpec:
    """A request that gets `max_tokens` tokens, whatever they are. `more`: other fields of the spec."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    fields: dict[str, object] = {"params": params, "token_window": 1 << 30} | more
    return RequestSpec(RequestKey(name, 0), tuple(prompt.tolist()), **fields)  # type: ignore[arg-type]


def start_decoding(engine: Engine, spec: RequestSpec) -> bool:
    """Take what lies in the request's blocks as the KV of its prompt; False if it is refused now."""
    owner = spec.key.request_id
    if engine.reserve(owner, spec) is None:
        return False
    engine.commit_ticket(owner, spec, 0)
    return True


def gaps_of(times: Iterable[Sequence[float]]) -> list[float]:
    """Between each token of a sequence and its next."""
    return [later - earlier for row in times for earlier, later in pairwise(row)]
