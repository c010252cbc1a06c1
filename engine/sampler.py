"""Sampling as a pure function of (logits, parameters, seed, sample index, position).

Noise comes from a counter-based generator: a hash of the row's key (seed, sample index, position) and the token id.
Adding Gumbel noise to the scaled logits and taking the largest samples from their softmax. So a row's result depends
on that row alone, and an unlikely-to-matter change of the logits changes it only where two scores nearly tie.

Logits are changed first (`engine.shaping`: bias, penalties, excluded tokens), then divided by the temperature.
Filters are thresholds on these scaled logits, applied in the usual order: top-k, then top-p among those left, then
min-p. Tokens that tie with the last one kept are kept as well, whatever their order.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.shaping import ShapingFields, shape
from engine.step import NO_TOKEN

_CANDIDATES = 512  # rows whose filters keep at most this many tokens never sort the whole vocabulary
_MASK64 = (1 << 64) - 1


class SamplingFields(ShapingFields, Protocol):
    """The fields of `engine.step.StepInput` that sampling reads; shapes and dtypes are described there."""

    @property
    def temperature(self) -> NDArray[np.float32]: ...
    @property
    def top_p(self) -> NDArray[np.float32]: ...
    @property
    def min_p(self) -> NDArray[np.float32]: ...
    @property
    def top_k(self) -> NDArray[np.int32]: ...
    @property
    def seeds(self) -> NDArray[np.uint64]: ...
    @property
    def sample_index(self) -> NDArray[np.int32]: ...
    @property
    def sample_positions(self) -> NDArray[np.int64]: ...


def sample(logits: torch.Tensor, fields: SamplingFields) -> torch.Tensor:
    """Choose a token per row.

    Args:
        logits: float32 [R, V]; not changed.
        fields: of R rows.

    Returns:
        int64 [R]; `NO_TOKEN` in rows in which every token is excluded.
    """
    shaped = shape(logits, fields)
    if shaped is None:
        return _choose(logits, fields)
    return _choose(shaped.logits, fields).masked_fill_(shaped.stuck, NO_TOKEN)


def _choose(logits: torch.Tensor, fields: SamplingFields) -> torch.Tensor:
    random_rows = np.flatnonzero(fields.temperature > 0)
    if len(random_rows) == 0:
        return logits.argmax(-1)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    greedy_rows = np.flatnonzero(fields.temperature <= 0)
    if len(greedy_rows):
        index = torch.from_numpy(greedy_rows)
        tokens[index] = logits[index].argmax(-1)
    index = torch.from_numpy(random_rows)
    tokens[index] = _sample_random(logits[index], fields, random_rows)
    return tokens


def _sample_random(logits: torch.Tensor, fields: SamplingFields, rows: NDArray[np.int64]) -> torch.Tensor:
    """int64 [N] for `logits` [N, V], which belong to `rows` of `fields`, all with a temperature above 0."""
    vocab = logits.shape[1]
    temperature = torch.from_numpy(fields.temperature[rows]).unsqueeze(1)
    # Relative to the largest, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    keys = _row_keys(fields.seeds[rows], fields.sample_index[rows], fields.sample_positions[rows])
    top_k = torch.from_numpy(fields.top_k[rows].astype(np.int64))
    top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    top_p = torch.from_numpy(fields.top_p[rows])
    floor = torch.from_numpy(
        np.log(fields.min_p[rows], where=fields.min_p[rows] > 0, out=np.full(len(rows), -np.inf))
    )
    floor = floor.float().unsqueeze(1)

    tokens = torch.empty(len(rows), dtype=torch.int64)
    filtered = (top_k < vocab) | (top_p < 1)
    pending = torch.nonzero(filtered).squeeze(1)
    for count in dict.fromkeys((min(_CANDIDATES, vocab), vocab)):
        if len(pending) == 0:
            break
        values, ids = torch.topk(scaled[pending], count)
        threshold = _threshold(scaled[pending], values, top_k[pending], top_p[pending])
        threshold = torch.maximum(threshold, floor[pending])
        scores = values + _gumbel(keys[pending], ids)
        choice = scores.masked_fill_(values < threshold, -torch.inf).argmax(-1, keepdim=True)
        # Ties of the last candidate may lie beyond the candidates: decided only if that one is out, or excluded and
        # with it all beyond.
        last = values[:, -1]
        decided = (last < threshold.squeeze(1)) | (last == -torch.inf)
        if count == vocab:
            decided.fill_(True)
        tokens[pending[decided]] = ids.gather(1, choice).squeeze(1)[decided]
        pending = pending[~decided]

    plain = torch.nonzero(~filtered).squeeze(1)
    if len(plain):
        values = scaled[plain]
        scores = values + _gumbel(keys[plain], torch.arange(vocab).unsqueeze(0))
        tokens[plain] = scores.masked_fill_(values < floor[plain], -torch.inf).argmax(-1)
    return tokens


def _threshold(scaled: torch.Tensor, values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Smallest scaled logit that top-k and top-p keep: [N, 1]; -inf for a row that `values` cannot decide.

    Args:
        scaled: [N, V]. values: [N, C], the C largest of each row, falling.
        top_k: int64 [N], V where it is off. top_p: float32 [N].
    """
    count, vocab = values.shape[1], scaled.shape[1]
    kth = values.gather(1, (top_k - 1).clamp(max=count - 1).unsqueeze(1))
    limits_k = top_k.unsqueeze(1) < vocab
    # Rows with top-k: the mass left is that of the candidates at or above the k-th. Else it is that of all tokens.
    # A running sum, for it adds in the same order whatever else is in the batch.
    running = torch.where(limits_k & (values < kth), -torch.inf, values).exp_().cumsum(-1)
    mass = torch.where(limits_k, running[:, -1:], _exp_sum(scaled))
    reached = running >= top_p.unsqueeze(1) * mass
    first = torch.where(reached.any(-1), reached.int().argmax(-1), count - 1).unsqueeze(1)
    last = torch.where(top_p.unsqueeze(1) < 1, values.gather(1, first), -torch.inf)
    undecided = limits_k & (top_k.unsqueeze(1) > count)
    undecided |= (top_p.unsqueeze(1) < 1) & ~reached.any(-1, keepdim=True) & (count < vocab)
    undecided &= values[:, -1:] > -torch.inf  # else all tokens that are not excluded are candidates
    threshold = torch.maximum(last, torch.where(limits_k, kth, -torch.inf))
    return torch.where(undecided, -torch.inf, threshold)


def _exp_sum(scaled: torch.Tensor) -> torch.Tensor:
    """Sum of exponentials by row, [N, 1], the same for a row alone as within a batch: a plain reduction is split over
    threads differently if there is one row, so this goes by log-softmax. The largest of a row is 0."""
    return torch.log_softmax(scaled, -1).amax(-1, keepdim=True).neg_().exp_()


def _row_keys(
    seeds: NDArray[np.uint64], sample_index: NDArray[np.int32], positions: NDArray[np.int64]
) -> torch.Tensor:
    """Two 32-bit keys per row: int32 [N, 2]."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        key = _splitmix64(seeds.astype(np.uint64))
        key = _splitmix64(key ^ positions.astype(np.uint64))
        key = _splitmix64(key ^ sample_index.astype(np.int64).astype(np.uint64))
    return torch.from_numpy(key.view(np.int32).reshape(-1, 2).copy())


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 step: a bijection of 64-bit words that mixes all bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [N, C], for row `keys` int32 [N, 2] and `token_ids` int64 [N or 1, C].

    A 32-bit mix of the token id with both keys; 32-bit integers are what vector units multiply.
    """
    x = token_ids.to(torch.int32) * -1640531527 + keys[:, :1]
    x ^= (x >> 16) & 0xFFFF  # the shift is arithmetic; the mask makes it logical
    x *= 0x7FEB352D
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261
    x ^= (x >> 16) & 0xFFFF
    uniform = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    # -log of an exponential variate. Its small values decide, and there the uniform is finest.
    return uniform.neg_().log1p_().neg_().log_().neg_()
