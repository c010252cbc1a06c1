"""Checks of what changes a request's logits (penalties, bias, allowed tokens, bad words) and of log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdcore.errors import InvalidRequest
from pdcore.logprobs import MAX_LOGPROBS
from protos import generation_pb2
from router.tokenizer import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, GenerationDefaults, TextModel

MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class LogitParams:
    """The checked values, named as in `pdcore.types.SamplingParams`."""

    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    logprobs: int | None
    prompt_logprobs: int | None


async def logit_params(
    sampling: generation_pb2.Sampling, text_model: TextModel, defaults: GenerationDefaults, vocab_size: int
) -> LogitParams:
    """Raises InvalidRequest, naming the field and what is allowed."""
    repetition = defaults.repetition_penalty or 1.0
    if sampling.HasField("repetition_penalty"):
        repetition = sampling.repetition_penalty
        # 0.01 is a little less in the message's 32 bits.
        if not MIN_REPETITION_PENALTY * (1 - 1e-6) <= repetition <= MAX_REPETITION_PENALTY:
            allowed = f"in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
            raise InvalidRequest("sampling.repetition_penalty", f"must be {allowed}, got {repetition:g}")
    if len(sampling.allowed_token_ids) > vocab_size:
        problem = f"must be no more than the vocabulary has, {vocab_size}, got {len(sampling.allowed_token_ids)}"
        raise InvalidRequest("sampling.allowed_token_ids", problem)
    check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    return LogitParams(
        presence_penalty=_penalty(sampling, "presence_penalty"),
        frequency_penalty=_penalty(sampling, "frequency_penalty"),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(sampling, vocab_size),
        allowed_token_ids=tuple(sorted(set(sampling.allowed_token_ids))),
        bad_words=await _bad_words(sampling.bad_words, text_model, vocab_size),
        logprobs=_top(sampling, "logprobs"),
        prompt_logprobs=_top(sampling, "prompt_logprobs"),
    )


def check_some_allowed(params: LogitParams, early_stops: Collection[int]) -> None:
    """Raises InvalidRequest if no token is left for the first position. `early_stops` are excluded there."""
    banned = {word[0] for word in params.bad_words if len(word) == 1} | set(early_stops)
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        problem = "must leave a token beside bad_words, and beside end and stop tokens while min_tokens excludes them"
        raise InvalidRequest("sampling.allowed_token_ids", problem)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an id that is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        problem = f"must be below the vocabulary size {vocab_size}, got {token_id}"
        raise InvalidRequest(f"{field}[{position}]", problem)


def _penalty(sampling: generation_pb2.Sampling, name: str) -> float:
    value = float(getattr(sampling, name))  # 0 if unset
    if not -MAX_PENALTY <= value <= MAX_PENALTY:  # NaN is inside no range
        raise InvalidRequest(f"sampling.{name}", f"must be in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}], got {value:g}")
    return value


def _top(sampling: generation_pb2.Sampling, name: str) -> int | None:
    if not sampling.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
        return None
    value = int(getattr(sampling, name))
    if value > MAX_LOGPROBS:
        raise InvalidRequest(f"sampling.{name}", f"must be at most {MAX_LOGPROBS}, got {value}")
    return value


def _logit_bias(sampling: generation_pb2.Sampling, vocab_size: int) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(sampling.logit_bias) > MAX_BIASED:
        raise InvalidRequest(field, f"must have at most {MAX_BIASED} tokens, got {len(sampling.logit_bias)}")
    biases = tuple(sorted(sampling.logit_bias.items()))  # a map has no order of its own
    for token_id, bias in biases:
        if token_id >= vocab_size:
            raise InvalidRequest(field, f"must have tokens below the vocabulary size {vocab_size}, got {token_id}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            allowed = f"[{-MAX_BIAS:g}, {MAX_BIAS:g}]"
            raise InvalidRequest(field, f"must have values in {allowed}, got {bias:g} for token {token_id}")
    return biases


async def _bad_words(words: Sequence[str], text_model: TextModel, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words: each as it stands, and behind a space, for most tokenizers tell these apart."""
    field = "sampling.bad_words"
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(field, f"must be at most {MAX_BAD_WORDS} words, got {len(words)}")
    for index, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            problem = f"must have 1 to {MAX_BAD_WORD_CHARS} characters, got {len(word)}"
            raise InvalidRequest(f"{field}[{index}]", problem)
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    found: dict[tuple[int, ...], None] = {}
    tokens = await text_model.tokenize_words(forms)
    for index in range(len(words)):
        bare, spaced = tokens[2 * index], tokens[2 * index + 1]
        # A blank word behind a space would be another word. What the model has no row for, it cannot write.
        usable = [ids for ids in (bare, spaced if words[index].strip() else []) if ids and max(ids) < vocab_size]
        if not usable:
            raise InvalidRequest(f"{field}[{index}]", "has no tokens that this model could write")
        found.update((tuple(ids), None) for ids in usable)
    return tuple(found)
