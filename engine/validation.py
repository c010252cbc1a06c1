"""Which requests an engine can never run, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.blocks import BlockManager
from engine.sequence import Sequence, SequenceKind
from pdcore.errors import InvalidRequest
from pdcore.logprobs import MAX_LOGPROBS
from pdcore.types import MAX_SAMPLES, RequestSpec, SamplingParams


def check_request(
    spec: RequestSpec, kind: SequenceKind, vocab_size: int, max_model_len: int, blocks: BlockManager
) -> None:
    """Raise InvalidRequest, naming the first bad field and what is allowed."""
    for field, problem in _problems(spec, kind, vocab_size, max_model_len, blocks):
        raise InvalidRequest(field, problem)


def _problems(
    spec: RequestSpec, kind: SequenceKind, vocab_size: int, max_model_len: int, blocks: BlockManager
) -> Iterator[tuple[str, str]]:
    """(field, what is wrong and what is allowed) of all that is wrong."""
    params = spec.params
    if not spec.prompt:
        yield "prompt", "must have at least one token"
    if spec.branches:
        yield from _branch_problems(spec)
    if not 0 <= spec.sample < MAX_SAMPLES:
        yield "sample", f"must be in [0, {MAX_SAMPLES}), got {spec.sample}"
    if params.max_tokens < 1:
        yield "sampling.max_tokens", f"must be at least 1, got {params.max_tokens}"
    if spec.token_window < 1:
        yield "token_window", f"must be at least 1, got {spec.token_window}"
    if not math.isfinite(params.temperature) or params.temperature < 0:
        yield "sampling.temperature", f"must be a number of at least 0, got {params.temperature}"
    if not 0 <= params.top_k < 1 << 31:
        yield "sampling.top_k", f"must be in [0, 2147483648), got {params.top_k}"
    if not 0 < params.top_p <= 1:
        yield "sampling.top_p", f"must be in (0, 1], got {params.top_p}"
    if not 0 <= params.min_p < 1:
        yield "sampling.min_p", f"must be in [0, 1), got {params.min_p}"
    if params.min_tokens < 0:
        yield "sampling.min_tokens", f"must be at least 0, got {params.min_tokens}"
    if not 0 <= params.seed < 1 << 64:
        yield "sampling.seed", f"must be an unsigned 64-bit integer, got {params.seed}"
    yield from _rule_problems(params)
    for field, ids in (
        ("prompt", spec.prompt),
        ("delivered", spec.delivered),
        ("sampling.stop_token_ids", params.stop_token_ids),
        ("sampling.allowed_token_ids", params.allowed_token_ids),
        ("sampling.logit_bias", tuple(token for token, _ in params.logit_bias)),
        ("sampling.bad_words", tuple(token for word in params.bad_words for token in word)),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            yield field, f"token id {bad} is not in [0, {vocab_size})"
    if len(spec.delivered) >= params.max_tokens:
        yield "delivered", f"{len(spec.delivered)} tokens leave none of max_tokens {params.max_tokens} to generate"
    if spec.delivered and spec.delivered[-1] in params.stop_token_ids:
        yield "delivered", f"ends in stop token {spec.delivered[-1]}: nothing is left to generate"
    if len(spec.prompt) + params.max_tokens > max_model_len:
        yield (
            "prompt",
            f"{len(spec.prompt)} tokens and max_tokens {params.max_tokens} exceed the context of"
            f" {max_model_len} tokens",
        )
    needed = blocks.blocks_for(Sequence.total_tokens(spec, kind) - 1)
    if needed > blocks.num_blocks:
        yield (
            "prompt",
            f"{len(spec.prompt)} tokens and what is generated from them need {needed} KV blocks of"
            f" {blocks.block_size} tokens; this worker has {blocks.num_blocks}",
        )


def _branch_problems(spec: RequestSpec) -> Iterator[tuple[str, str]]:
    """As `_problems`, of the trunk of several samples."""
    if len(spec.branches) > MAX_SAMPLES:
        yield "branches", f"must be at most {MAX_SAMPLES}, got {len(spec.branches)}"
    if len({spec.key, *spec.branch_keys}) <= len(spec.branches):
        yield "branches", "must have names of their own, each its own"
    bad = next((branch.sample for branch in spec.branches if not 0 <= branch.sample < MAX_SAMPLES), None)
    if bad is not None:
        yield "branches", f"must be samples in [0, {MAX_SAMPLES}), got {bad}"
    if spec.delivered:
        yield "delivered", f"has {len(spec.delivered)} tokens: nothing is delivered of a trunk"


def _rule_problems(params: SamplingParams) -> Iterator[tuple[str, str]]:
    """As `_problems`, of what changes the logits and of log-probabilities."""
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not math.isfinite(value):
            yield f"sampling.{name}", f"must be a number, got {value}"
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        yield "sampling.repetition_penalty", f"must be a number above 0, got {params.repetition_penalty}"
    biased = [token for token, _ in params.logit_bias]
    if len(set(biased)) != len(biased):
        yield "sampling.logit_bias", "must have each token once"
    bad = next((bias for _, bias in params.logit_bias if not math.isfinite(bias)), None)
    if bad is not None:
        yield "sampling.logit_bias", f"must have numbers, got {bad}"
    if not all(params.bad_words):
        yield "sampling.bad_words", "must have at least one token each"
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            yield f"sampling.{name}", f"must be in [0, {MAX_LOGPROBS}], got {value}"
