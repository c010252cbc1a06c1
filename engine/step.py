"""What crosses between the engine and a model runner: flat arrays in, flat arrays out.

No object of the engine appears here, so that a step can be copied into static buffers (CUDA graphs), broadcast
to ranks, or handed to native code in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.token_rules import LogitRules
from pdcore.types import KvGeometry, ModelInfo

if TYPE_CHECKING:  # this module is pure: the scheduler and the simulator import it without torch
    import torch


NO_TOKEN = -1
"""In the place of a sampled token: every token is excluded."""


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """Rows of a step whose next token is known, and of which only log-probabilities are wanted.

    Attributes:
        rows: int32 [Q]; token rows. targets: int64 [Q]; the token that follows each.
        top: likeliest tokens wanted for each.
    """

    rows: NDArray[np.int32]
    targets: NDArray[np.int64]
    top: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass over T tokens of S sequences, of which R rows are sampled.

    The tokens of a sequence are consecutive; sequence s owns rows ``query_start[s]:query_start[s + 1]``. Sequences
    with a single token (decodes) come first.

    Attributes:
        step_id: counts steps from 1.
        num_decodes: how many sequences, from the front, have exactly one token.
        token_ids: int64 [T]; where ``token_slots`` is not -1 the value is ignored.
        token_slots: int32 [T]; i >= 0 means "the token last sampled into slot i", -1 means `token_ids`.
        positions: int64 [T]; position of each token in its sequence.
        slot_mapping: int64 [T]; ``block * block_size + offset`` where the token's K and V are written.
        query_start: int32 [S + 1].
        context_lens: int32 [S]; tokens in the cache once this step's are written.
        block_tables: int32 [S, B]; block ids in order, padded with 0.
        sample_rows: int32 [R]; token rows whose logits are sampled.
        sample_slots: int32 [R]; where the runner keeps each sampled token; below ``max_num_seqs * MAX_SAMPLES``.
        temperature, top_p, min_p: float32 [R]. top_k: int32 [R], 0 is off.
        seeds: uint64 [R]. sample_index: int32 [R]. sample_positions: int64 [R], position of the token being sampled.
        forbidden_rows, forbidden_tokens: int32 [F]; pairs (index into the R samples, token) that may not be sampled.
        mask_rows: int32 [M]; those of the R samples that are limited to certain tokens.
        mask_bits: uint32 [M, W]; bit ``t % 32`` of word ``t // 32`` is set if token t may be sampled. It is written
            while the forward pass runs: call `await_masks`, which blocks until it is complete, before reading it.
        rules: what else changes the logits before sampling; None if nothing does.
        logprobs: int32 [R], how many likeliest tokens are wanted of each sample's distribution, before anything
            changes its logits; -1 is none, not even of the sampled token. None if all are -1.
        scores: rows that are scored and not sampled; None if there are none.
    """

    step_id: int
    num_decodes: int
    token_ids: NDArray[np.int64]
    token_slots: NDArray[np.int32]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sample_rows: NDArray[np.int32]
    sample_slots: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seeds: NDArray[np.uint64]
    sample_index: NDArray[np.int32]
    sample_positions: NDArray[np.int64]
    forbidden_rows: NDArray[np.int32]
    forbidden_tokens: NDArray[np.int32]
    mask_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    mask_bits: NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 0), np.uint32))
    await_masks: Callable[[], None] = lambda: None
    rules: LogitRules | None = None
    logprobs: NDArray[np.int32] | None = None
    scores: ScoreInput | None = None

    @property
    def logit_rows(self) -> NDArray[np.int32]:
        """Token rows of which a model computes logits: those that are sampled, then those that are scored."""
        return self.sample_rows if self.scores is None else np.concatenate((self.sample_rows, self.scores.rows))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of N rows.

    `values`: float32 [N], of each row's token. `top_ids`: int32 [N, K], the row's likeliest tokens, the likeliest
    first; `top_values`: float32 [N, K], of those.
    """

    values: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step.

    Attributes:
        token_ids: int64 [R], in the order of ``StepInput.sample_rows``; `NO_TOKEN` where none could be sampled.
        logprobs: of the samples that asked for them, in order, with the largest K asked for.
        scores: of the rows of ``StepInput.scores``.
    """

    token_ids: NDArray[np.int64]
    logprobs: RowLogprobs | None = None
    scores: RowLogprobs | None = None


class StepProgress:
    """How far the running step has come through the layers, for a sender that watches from another thread.

    The runner sets `layers_done` to 0 *before* it sets `step_id`, and raises `layers_done` after each layer's K and
    V are in the cache. A reader that sees its step's id and `layers_done >= n` may gather layers ``0..n-1``: it must
    read `step_id`, then `layers_done`, then `step_id` again, and trust the reading only if both ids are its own.
    """

    __slots__ = ("layers_done", "step_id")

    def __init__(self) -> None:
        self.step_id = 0
        self.layers_done = 0

    def total(self, num_layers: int) -> int:
        """Layers done since the start, about: grows with every layer of every step. For a sign of life."""
        return self.step_id * num_layers + self.layers_done

    def layers_of(self, step_id: int) -> int:
        """Layers whose K and V of step `step_id` are in the cache, if that step is running; else 0."""
        if self.step_id != step_id:
            return 0
        done = self.layers_done
        return done if self.step_id == step_id else 0


class KvCache(Protocol):
    """The runner's paged cache in its backend's own layout, seen through the canonical one.

    Canonical is (layer, K or V, token, head, dim). Both calls may be made from several threads at once on disjoint
    blocks, also while a step runs, and release the GIL for their bulk.
    """

    geometry: KvGeometry

    def gather(
        self, layer_start: int, layer_count: int, block_ids: Sequence[int], token_start: int, token_count: int
    ) -> torch.Tensor:
        """Contiguous CPU tensor [layer_count, 2, token_count, num_kv_heads, head_dim] in the cache's dtype.

        `block_ids` is the sequence's whole block table; tokens are counted from the start of the sequence.
        """
        ...

    def scatter(
        self, layer_start: int, block_ids: Sequence[int], token_start: int, values: torch.Tensor, head_start: int = 0
    ) -> None:
        """The inverse of `gather`; `values` may have fewer heads, from `head_start` of this cache on."""
        ...


class ModelRunner(Protocol):
    """Owns the weights and the paged cache. One thread calls `run`; `progress` may be read from any."""

    model: ModelInfo
    geometry: KvGeometry
    progress: StepProgress

    @property
    def cache(self) -> KvCache: ...

    def run(self, step: StepInput) -> StepOutput:
        """Run one forward pass, write K and V of its tokens, sample. Blocks until the tokens are on the host."""
        ...
