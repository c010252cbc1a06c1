"""Changing logits before a token is sampled: masks, bias, penalties, and tokens that may not be sampled.

All of it is elementwise on (row, token) pairs, so a row's result depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.token_masks import MaskFields, keep_allowed
from engine.token_rules import LogitRules, Pairs


class ShapingFields(MaskFields, Protocol):
    """The fields of `engine.step.StepInput` that this reads; shapes and dtypes are described there."""

    @property
    def forbidden_rows(self) -> NDArray[np.int32]: ...
    @property
    def forbidden_tokens(self) -> NDArray[np.int32]: ...
    @property
    def rules(self) -> LogitRules | None: ...


class Shaped(NamedTuple):
    """`logits`: float32 [R, V], -inf where a token may not be sampled. `stuck`: bool [R], where none may."""

    logits: torch.Tensor
    stuck: torch.Tensor


def shape(logits: torch.Tensor, fields: ShapingFields) -> Shaped | None:
    """Apply what the fields say to `logits`, float32 [R, V], which are not changed. None if they say nothing."""
    rules = fields.rules
    masked = keep_allowed(logits, fields)
    if rules is None and not len(fields.forbidden_rows):
        return None if masked is logits else Shaped(masked, masked.amax(-1) == -torch.inf)
    logits = logits.clone() if masked is logits else masked
    if rules is not None:
        _add_bias(logits, rules)
        _penalize(logits, rules)
        _keep_allowed(logits, rules.allowed)
        logits[_index(rules.banned)] = -torch.inf
    logits[_index(Pairs(fields.forbidden_rows, fields.forbidden_tokens))] = -torch.inf
    return Shaped(logits, logits.amax(-1) == -torch.inf)


def _index(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(pairs.rows.astype(np.int64)), torch.from_numpy(pairs.tokens.astype(np.int64))


def _add_bias(logits: torch.Tensor, rules: LogitRules) -> None:
    if len(rules.bias):
        logits[_index(rules.biased)] += torch.from_numpy(rules.bias)


def _penalize(logits: torch.Tensor, rules: LogitRules) -> None:
    if not len(rules.seen_counts):
        return
    rows, tokens = _index(rules.seen)
    counts = torch.from_numpy(rules.seen_counts)
    values = logits[rows, tokens]
    repetition = torch.from_numpy(rules.repetition)[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= torch.from_numpy(rules.frequency)[rows] * counts
    values -= torch.from_numpy(rules.presence)[rows] * (counts > 0)
    logits[rows, tokens] = values


def _keep_allowed(logits: torch.Tensor, allowed: Pairs) -> None:
    if not len(allowed.rows):
        return
    rows, tokens = _index(allowed)
    restricted, places = torch.unique(rows, return_inverse=True)
    kept = torch.full((len(restricted), logits.shape[1]), -torch.inf)
    kept[places, tokens] = logits[rows, tokens]
    logits[restricted] = kept
