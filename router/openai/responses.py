"""``/v1/responses`` in its text form: what a request says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pdcore.errors import InvalidRequest
from pdcore.logprobs import MAX_LOGPROBS
from router.openai.errors import renamed
from router.openai.fields import (
    UINT32,
    UINT64,
    Count,
    GenerationFields,
    Ignored,
    JsonSchemaFormat,
    ResponseFormat,
    Strings,
    common_names,
    ranged,
    template_arguments,
)
from router.openai.parsing import Message
from router.openai.plan import Headers, Plan, begin_plan
from router.openai.response_items import Input, InputChat
from router.openai.tools import TOOL_CHOICE_NAMES, ResponseTool, ResponseToolChoice, add_tools, check_readable
from router.validation import MAX_TEMPERATURE

LOGPROBS = "message.output_text.logprobs"
_NOT_KEPT = "responses are not kept here"
Includes = Annotated[
    list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)
]


class TextFormat(Message):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="The text fits the schema in any case.")


class TextOptions(Message):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Message):
    include_obfuscation: Ignored = None


class Reasoning(Message):
    """How much the model thinks before it answers."""

    effort: Literal["none"] | None = Field(
        default=None, description="The chat template is told so, if it asks; chat_template_kwargs win over it."
    )
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponseRequest(Message):
    """Asks for a response."""

    model: str | None = Field(default=None, description="The served model, which is also meant if nothing is said.")
    input: Input
    instructions: str | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: Count | None = None
    temperature: float | None = ranged(minimum=0, maximum=MAX_TEMPERATURE)
    top_p: float | None = ranged(exclusiveMinimum=0, maximum=1)
    top_logprobs: Count | None = ranged(f"With {LOGPROBS} in include.", maximum=MAX_LOGPROBS)
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: ResponseToolChoice = Field(default=None, description="auto, if there are tools.")
    parallel_tool_calls: bool | None = Field(default=None, description="Several calls at once; default true.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Includes | None = None
    metadata: dict[str, str] | None = Field(default=None, description="Told again in the response.")
    reasoning: Reasoning | None = None
    store: Literal[False] | None = Field(default=None, description="Responses are not kept.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: Ignored = None
    user: str | None = Field(default=None, description="Told again in the response.")
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    top_k: Annotated[int, Field(ge=-1, le=UINT32)] | None = Field(default=None, description="0 and -1: off.")
    min_p: float | None = ranged(minimum=0, exclusiveMaximum=1)
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=UINT64)] | None = None
    stop: Strings = None
    ignore_eos: bool | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    request_id: str | None = Field(default=None, description="Wins over the header x-request-id.")
    cache_salt: str | None = None
    kv_codec: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="More variables of the model's chat template, such as enable_thinking."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": f"is not supported: {_NOT_KEPT}; send the earlier items again, in input",
        "conversation": f"is not supported: {_NOT_KEPT}; send the earlier items again, in input",
        "prompt": "is not supported: there are no prompts here that could be referred to",
        "context_management": "is not supported here",
        "moderation": "is not supported here",
    }


# Of the same name and meaning in all requests.
_SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos",
    "priority", "request_id", "cache_salt", "kv_codec",
)  # fmt: skip


def plan_response(body: ResponseRequest, headers: Headers, served_name: str, *, readable: bool) -> Plan:
    """Plan a response; see `router.openai.chat.plan_chat`. Raises InvalidRequest."""
    wants_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise InvalidRequest("top_logprobs", f"may be set only if include has {LOGPROBS}")
    shared = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if body.max_output_tokens is not None:
        shared["max_tokens"] = body.max_output_tokens
    form = _form(body.text)
    if form is not None:
        shared["response_format"] = form
    plan, request = begin_plan(GenerationFields.model_construct(**shared), headers, served_name)
    if wants_logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    chat = InputChat(body.instructions, body.input)
    request.chat.messages.extend(chat.messages)
    effort = None if body.reasoning is None else body.reasoning.effort
    request.chat.template_arguments = template_arguments(body.chat_template_kwargs, effort)
    add_tools(request.chat, body.tools or (), body.tool_choice, body.parallel_tool_calls)
    names = [
        *chat.names,
        ("chat.tools", "tools"),
        *TOOL_CHOICE_NAMES,
        ("chat.template_arguments", "chat_template_kwargs"),
        ("chat", "input"),
        ("sampling.max_tokens", "max_output_tokens"),
        ("sampling.logprobs", "top_logprobs"),
        ("sampling.structured_output.json_schema", "text.format.schema"),
        ("sampling.structured_output", "text.format"),
        *common_names(body.request_id),
    ]
    plan.requests.append(request)
    plan.names.append(names)
    try:
        check_readable(request.chat, readable)
    except InvalidRequest as error:
        raise renamed(error, names) from error
    return plan


def _form(text: TextOptions | None) -> ResponseFormat | None:
    """The form of the answer as chats have it. Raises InvalidRequest."""
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat.model_construct(type="json_object")
    if wanted.schema_ is None:
        raise InvalidRequest("text.format.schema", "must be set")
    schema = JsonSchemaFormat.model_construct(name=wanted.name or "", schema_=wanted.schema_)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)
