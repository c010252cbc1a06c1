"""Fields that requests for completions and for chats have in common, and what the core's messages make of them.

Beside OpenAI's own there are those that clients of vLLM and SGLang send as ``extra_body``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pdcore.errors import InvalidRequest
from pdcore.logprobs import MAX_LOGPROBS
from pdcore.types import MAX_SAMPLES
from protos import generation_pb2, worker_pb2
from router.logit_validation import MAX_PENALTY
from router.openai.parsing import Message
from router.validation import MAX_STOPS, MAX_TEMPERATURE

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1

Count = Annotated[int, Field(ge=0, le=UINT32)]
TokenIds = Annotated[list[Count], Field(fail_fast=True)]
Ignored = Annotated[
    Any,
    BeforeValidator(lambda _: None),  # or it would be kept for as long as the request runs
    Field(description="Accepted, without effect."),
]

CACHING_HINTS = ("prompt_cache_breakpoint", "cache_control")
"""Of parts of a text: accepted, without effect. The first is OpenAI's, the second is sent for models of others."""

PRIORITIES = {
    "interactive": generation_pb2.PRIORITY_INTERACTIVE,
    "standard": generation_pb2.PRIORITY_STANDARD,
    "batch": generation_pb2.PRIORITY_BATCH,
}


def _strings(value: object) -> object:
    """One string or several, as several."""
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise PydanticCustomError("strings", "must be a string or a list of strings")
    return strings


Strings = Annotated[
    Any,
    BeforeValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


def ranged(description: str = "", **limits: float) -> Any:
    """A field that is not set by default. `limits` are for the description: who checks them is the core."""
    return Field(default=None, description=description or None, json_schema_extra=dict(limits))


NO_REASONING = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
"""How chat templates are told not to let the model think; those of models that never do look at none of these."""


def template_arguments(kwargs: Mapping[str, Any] | None, effort: Literal["none"] | None) -> str:
    """More variables of the chat template, as the core takes them; `kwargs` win over what `effort` stands for."""
    variables = {**(NO_REASONING if effort == "none" else {}), **(kwargs or {})}
    return json.dumps(variables, ensure_ascii=False) if variables else ""


class StreamOptions(Message):
    include_usage: bool | None = Field(
        default=None, description="End with a chunk that has the usage, and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Each chunk has the usage of its choice so far, if include_usage is true."
    )
    include_obfuscation: Ignored = None


class JsonSchemaFormat(Message):
    """A schema that the output has to fit."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="The output fits the schema in any case.")


class ResponseFormat(Message):
    """The form of the output, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Message):
    """The form of the output; one of these."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = Field(default=None, description="EBNF, in the notation of Lark or GBNF.")


class GenerationFields(Message):
    """What both kinds of requests may say."""

    model: str | None = Field(default=None, description="The served model, which is also meant if nothing is said.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = Field(default=None, description="Of the output.")
    n: Count | None = ranged("Outputs for the prompt.", minimum=1, maximum=MAX_SAMPLES)
    temperature: float | None = ranged(minimum=0, maximum=MAX_TEMPERATURE)
    top_p: float | None = ranged(exclusiveMinimum=0, maximum=1)
    frequency_penalty: float | None = ranged(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    presence_penalty: float | None = ranged(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    seed: Annotated[int, Field(ge=-(2**63), le=UINT64)] | None = None
    stop: Strings = Field(default=None, description=f"At most {MAX_STOPS} strings, which end the output.")
    logit_bias: dict[str, float] | None = Field(default=None, description="By token id, as a decimal number.")
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    top_k: Annotated[int, Field(ge=-1, le=UINT32)] | None = Field(default=None, description="0 and -1: off.")
    min_p: float | None = ranged(minimum=0, exclusiveMaximum=1)
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt_logprobs: Count | None = ranged("Not while streaming.", maximum=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    priority: Literal["interactive", "standard", "batch"] | None = Field(
        default=None, description="The class of the request; the tenant's default if it is not set."
    )
    request_id: str | None = Field(default=None, description="Wins over the header x-request-id.")
    cache_salt: str | None = Field(
        default=None, description="Cached prompts are shared among requests of equal salt only."
    )
    kv_codec: str | None = Field(default=None, description="How the prompt's KV is packed on its way.")

    refused: ClassVar[Mapping[str, str]] = {
        name: "is not supported here"
        for name in (
            "audio",
            "best_of",
            "function_call",
            "functions",
            "logits_processors",
            "lora_request",
            "moderation",
            "prompt_embeds",
            "reasoning_effort",
            "suffix",
            "truncate_prompt_tokens",
            "use_beam_search",
            "verbosity",
            "web_search_options",
        )
    }

    @property
    def with_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def with_running_usage(self) -> bool:
        """Whether each event has the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)


# Under the same names in the core, and of the same meaning.
_PLAIN = (
    "max_tokens", "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def check_together(body: GenerationFields) -> None:
    """Raises InvalidRequest for fields that make no sense beside each other."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "may be set only if stream is true")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "may be set only if stream is not true")


def sampling_of(body: GenerationFields) -> generation_pb2.Sampling:
    """How tokens are chosen. Raises InvalidRequest for what a message of the core cannot say."""
    sampling = generation_pb2.Sampling()
    given = body.model_fields_set
    for name in _PLAIN:
        if name in given and (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    for name in _LISTS:
        if name in given and (value := getattr(body, name)) is not None:
            getattr(sampling, name).extend(value)
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.seed is not None:
        sampling.seed = body.seed & UINT64
    for token, bias in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= UINT32):
            raise InvalidRequest("logit_bias", "must have token ids, as decimal numbers, for its names")
        sampling.logit_bias[int(token)] = bias
    structure = structure_of(body)
    if structure is not None:
        sampling.structured_output.CopyFrom(structure[1])
    return sampling


def structure_of(body: GenerationFields) -> tuple[str, worker_pb2.StructuredOutput] | None:
    """The form of the output, and the field that asks for it. Raises InvalidRequest for more than one."""
    found: list[tuple[str, worker_pb2.StructuredOutput]] = []

    def add(field: str, **constraint: Any) -> None:
        found.append((field, worker_pb2.StructuredOutput(**constraint)))

    wanted = body.response_format
    if wanted is not None and wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        if schema is None:
            raise InvalidRequest("response_format.json_schema", "must be set, with a schema")
        _add_schema(found, "response_format.json_schema.schema", schema)
    elif wanted is not None and wanted.json_schema is not None:
        raise InvalidRequest("response_format.json_schema", "may be set only if type is json_schema")
    elif wanted is not None and wanted.type == "json_object":
        add("response_format", json_object=True)
    nested = body.structured_outputs
    if nested is not None:
        prefix = "structured_outputs."
        _add_schema(found, prefix + "json", nested.json_)
        if nested.json_object:
            add(prefix + "json_object", json_object=True)
        if nested.regex is not None:
            add(prefix + "regex", regex=nested.regex)
        if nested.choice is not None:
            add(prefix + "choice", choice=worker_pb2.Choice(choices=nested.choice))
        if nested.grammar is not None:
            add(prefix + "grammar", grammar=nested.grammar)
    _add_schema(found, "guided_json", body.guided_json)
    _add_schema(found, "json_schema", body.json_schema)
    if body.guided_choice is not None:
        add("guided_choice", choice=worker_pb2.Choice(choices=body.guided_choice))
    for name in ("guided_regex", "regex"):
        if (pattern := getattr(body, name)) is not None:
            add(name, regex=pattern)
    for name in ("guided_grammar", "ebnf"):
        if (grammar := getattr(body, name)) is not None:
            add(name, grammar=grammar)
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"may not be set beside {found[0][0]}")
    if nested is not None and not found:
        raise InvalidRequest("structured_outputs", "must have one of json, json_object, regex, choice and grammar")
    return found[0] if found else None


def _add_schema(
    found: list[tuple[str, worker_pb2.StructuredOutput]], field: str, schema: str | dict[str, Any] | None
) -> None:
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        found.append((field, worker_pb2.StructuredOutput(json_schema=text)))


def param_names(body: GenerationFields) -> list[tuple[str, str]]:
    """What stands for the core's names of fields; see `router.openai.errors.renamed`."""
    structure = structure_of(body)
    names = []
    if structure is not None:
        kind = structure[1].WhichOneof("constraint")
        names = [(f"sampling.structured_output.{kind}", structure[0]), ("sampling.structured_output", structure[0])]
    return [*names, *common_names(body.request_id)]


def common_names(request_id: str | None) -> list[tuple[str, str]]:
    """Those that all requests have; `request_id`: what the body says of it."""
    headers = [("idempotency_key", "Idempotency-Key"), ("tenant", "OpenAI-Organization")]
    if request_id is None:
        headers.append(("request_id", "x-request-id"))
    return [("sampling.", ""), *headers]
