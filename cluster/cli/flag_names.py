"""The flags that the fields of a request are given by: the cluster's errors name fields."""

from __future__ import annotations

from pdcore.errors import InvalidRequest

_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "min_tokens",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
)
_STRUCTURED = ("json_schema", "json_object", "regex", "choice", "grammar")
_REQUEST = ("model", "kv_codec", "priority", "tenant", "cache_salt", "request_id", "idempotency_key")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_FLAGS = {
    **{f"sampling.{name}": _flag(name) for name in _SAMPLING},
    **{f"sampling.structured_output.{name}": _flag(name) for name in _STRUCTURED},
    **{name: _flag(name) for name in _REQUEST},
    "sampling.stop_token_ids": "--stop-token",
    "sampling.allowed_token_ids": "--allowed-token",
    "sampling.bad_words": "--bad-word",
    "token_ids.ids": "--token-ids",
}


def flag_of(field: str) -> str:
    """The flag of a field such as ``sampling.stop[1]``: ``--stop number 2``; the field where there is none."""
    name, bracket, index = field.removesuffix("]").partition("[")
    if name not in _FLAGS:
        return field
    return f"{_FLAGS[name]} number {int(index) + 1}" if bracket and index.isdigit() else _FLAGS[name]


def with_flags(words: str, error: InvalidRequest) -> str:
    """What the cluster said, in `words`, of the fields that `error` names."""
    for field, _ in error.violations:
        words = words.replace(f"{field}: ", f"{flag_of(field)}: ", 1)
    return words
