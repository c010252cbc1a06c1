"""What a client asks for, as messages of generation.proto."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from protos import generation_pb2, worker_pb2

Messages = Sequence[Mapping[str, str]]
"""What is said so far: ``role`` and ``content`` of each message, ``name`` and ``tool_call_id`` if any."""

Prompt = str | Sequence[int] | Messages | generation_pb2.Chat
"""Text, token ids, chat messages, or a whole `Chat`, which can also offer tools."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})

Priority = Literal["", "interactive", "standard", "batch"]
"""Class of a request; empty: the tenant's."""


class RequestOptions(TypedDict, total=False):
    """What can be said of a request beside its prompt and `Sampling`. All are empty unless given.

    Attributes:
        model: refuse to run on another one than this.
        request_id: at most 128 characters of ``[A-Za-z0-9._:-]``; made by the client unless given.
        tenant: limits and the queue policy ``fair`` go by it. priority: class of the request.
        kv_codec: how KV travels inside the cluster. cache_salt: who shares cached prompts.
        idempotency_key: AlreadyRunning is raised while another request with this key runs.
    """

    model: str
    request_id: str
    tenant: str
    priority: Priority
    kv_codec: str
    cache_salt: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """See `Sampling` in generation.proto; None takes the default stated there.

    At most one of `json_schema` (as text or as an object), `json_object`, `regex`, `choice` and `grammar` says which
    form the output must have.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    n: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "choice"):
            if isinstance(getattr(self, name), str):  # which is a sequence of strings as well, and never meant so
                raise ValueError(f"{name}: a sequence of strings is allowed, got one string")


_PRIORITIES = {
    "interactive": generation_pb2.PRIORITY_INTERACTIVE,
    "standard": generation_pb2.PRIORITY_STANDARD,
    "batch": generation_pb2.PRIORITY_BATCH,
}


def build_request(
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    model: str = "",
    request_id: str = "",
    tenant: str = "",
    priority: Priority = "",
    kv_codec: str = "",
    cache_salt: str = "",
    idempotency_key: str = "",
) -> generation_pb2.GenerateRequest:
    """The message for a request; see `Client.generate`. Raises ValueError for what the message cannot carry."""
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        tenant=tenant,
        sampling=_sampling_message(sampling or Sampling()),
        kv_codec=kv_codec,
        cache_salt=cache_salt,
        idempotency_key=idempotency_key,
    )
    if priority:
        if priority not in _PRIORITIES:
            raise ValueError(f"priority: {priority!r} is not allowed; allowed: {', '.join(_PRIORITIES)}")
        message.priority = _PRIORITIES[priority]
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, str | Sequence | generation_pb2.Chat):
        raise ValueError(f"prompt: must be a text, token ids or messages, got {type(prompt).__name__}")
    if isinstance(prompt, str):
        message.prompt = prompt
    elif isinstance(prompt, generation_pb2.Chat) or (prompt and isinstance(prompt[0], Mapping)):
        message.chat.CopyFrom(_chat_message(prompt))
    else:
        try:
            message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # the branch above has taken the messages
        except TypeError as error:
            raise ValueError(f"prompt: must be a text, token ids or messages: {error}") from None
        message.token_ids.SetInParent()
    return message


def _sampling_message(sampling: Sampling) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        n=sampling.n,
        structured_output=_structured_message(sampling),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
    )


def _structured_message(sampling: Sampling) -> worker_pb2.StructuredOutput | None:
    schema = sampling.json_schema
    fields: dict[str, Any] = {
        "json_schema": schema if schema is None or isinstance(schema, str) else json.dumps(schema),
        "json_object": sampling.json_object or None,
        "regex": sampling.regex,
        "choice": worker_pb2.Choice(choices=sampling.choice) if sampling.choice else None,
        "grammar": sampling.grammar,
    }
    asked = {name: value for name, value in fields.items() if value is not None}
    if len(asked) > 1:
        raise ValueError(f"at most one of {', '.join(fields)} may be given, got {' and '.join(asked)}")
    return worker_pb2.StructuredOutput(**asked) if asked else None


def _chat_message(messages: Any) -> generation_pb2.Chat:
    if isinstance(messages, generation_pb2.Chat):
        return messages
    if not isinstance(messages, Sequence) or not all(isinstance(entry, Mapping) for entry in messages):
        raise ValueError("messages: must be a list of mappings, each with a role and a content")
    for entry in messages:
        unknown = entry.keys() - _MESSAGE_FIELDS
        if unknown:
            raise ValueError(f"a message has {', '.join(sorted(_MESSAGE_FIELDS))}, got {', '.join(sorted(unknown))}")
    try:
        return generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**entry) for entry in messages])
    except TypeError as error:
        raise ValueError(f"a message has values of another type than its fields: {error}") from None


def tokenize_request(prompt: str | Messages | generation_pb2.Chat, model: str) -> generation_pb2.TokenizeRequest:
    """Raises ValueError for what is neither a text nor messages."""
    if isinstance(prompt, str):
        return generation_pb2.TokenizeRequest(model=model, prompt=prompt)
    return generation_pb2.TokenizeRequest(model=model, chat=_chat_message(prompt))
