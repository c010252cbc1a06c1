"""``/v1/chat/completions``: what a request says, and what its answer looks like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from pdcore.errors import InvalidRequest, RequestError
from pdcore.logprobs import MAX_LOGPROBS
from protos import generation_pb2
from router.calls import Call
from router.openai.collected import Collected, Output, finish_reason
from router.openai.errors import renamed
from router.openai.exchange import DONE
from router.openai.fields import (
    CACHING_HINTS,
    Count,
    GenerationFields,
    Ignored,
    param_names,
    ranged,
    template_arguments,
)
from router.openai.logprobs import TokenTexts, chat_content, prompt_entries
from router.openai.parsing import UNKNOWN, Message, check_names
from router.openai.plan import Headers, Plan, begin_plan
from router.openai.tools import TOOL_CHOICE_NAMES, ChatTool, ChatToolChoice, add_tools, check_readable
from router.openai.usage import NO_USAGE, USAGE_COMES, RunningUsage, Usage
from router.stream import Chunk
from router.tools.events import Answer, CallArguments, CallBegin, Content, ToolCallParser
from router.tools.plan import ToolPlan

BETWEEN_PARTS = "\n"
"""Between the text parts of a message; as at vLLM."""


_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}, **{hint: {} for hint in CACHING_HINTS}},
    "required": ["type", "text"],
    "additionalProperties": False,
}


def _text(value: object) -> str:
    """A text, or its parts, as a text."""
    if isinstance(value, str):
        return value
    problem = "must be a string, or a list of parts of type text"
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "{problem}", {"problem": problem})
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "{problem}", {"problem": problem})
        check_names(part, _TEXT_PART["properties"], index)
        texts.append(part["text"])
    return BETWEEN_PARTS.join(texts)


Text = Annotated[
    Any,
    BeforeValidator(_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}),
]


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


OptionalText = Annotated[
    Any,
    BeforeValidator(_text_or_none),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}, {"type": "null"}]}
    ),
]


class CalledFunction(Message):
    """Which function, and with what."""

    name: str
    arguments: str = Field(description="JSON text of an object, as the model wrote it.")


class MessageToolCall(Message):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class ChatMessage(Message):
    """One message of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool"] = Field(
        description="developer is another word for system, unless the model's template knows it."
    )
    content: OptionalText = Field(
        default=None, description="Text, or parts of it. Only an assistant that calls tools may have none."
    )
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, description="Of a tool: the call whose result this is.")

    refused: ClassVar[Mapping[str, str]] = {
        name: "is not supported here" for name in ("audio", "refusal", "function_call")
    }

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError(UNKNOWN, "must be set", {"field": "content", "problem": ""})
        return self


class ChatFields(Message):
    """What requests may say of a chat."""

    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="More variables of the model's chat template, such as enable_thinking."
    )
    reasoning_effort: Literal["none"] | None = Field(
        default=None, description="The chat template is told so, if it asks; chat_template_kwargs win over it."
    )
    continue_final_message: bool | None = Field(
        default=None, description="The output goes on with the last message, the assistant's."
    )
    add_generation_prompt: bool | None = Field(default=None, description="The contrary of continue_final_message.")


class ChatRequest(GenerationFields, ChatFields):
    """A chat asks for its next message."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: Count | None = Field(default=None, description="The same as max_tokens.")
    logprobs: bool | None = Field(default=None, description="Of each token.")
    top_logprobs: Count | None = ranged("And of so many likeliest.", maximum=MAX_LOGPROBS)
    tool_choice: ChatToolChoice = Field(default=None, description="auto, if there are tools.")
    parallel_tool_calls: bool | None = Field(default=None, description="Several calls at once; default true.")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None
    prediction: Ignored = None


def plan_chat(body: ChatRequest, headers: Headers, served_name: str, *, readable: bool = True) -> Plan:
    """Plan a chat's request.

    Args:
        readable: whether the format is known in which the model calls tools.

    Raises:
        InvalidRequest
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "may be set only if logprobs is true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens", "may not differ from max_completion_tokens; set one of them")
    plan, request = begin_plan(body, headers, served_name)
    names = [*chat_names(body.messages, body.tools), ("sampling.logprobs", "top_logprobs")]
    if body.max_completion_tokens is not None:
        request.sampling.max_tokens = body.max_completion_tokens
        names.append(("sampling.max_tokens", "max_completion_tokens"))
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    request.chat.CopyFrom(chat_of(body.messages, body))
    add_tools(request.chat, [], body.tool_choice, body.parallel_tool_calls)
    plan.requests.append(request)
    plan.names.append([*names, *param_names(body)])
    try:
        check_readable(request.chat, readable)
    except InvalidRequest as error:
        raise renamed(error, names) from error
    return plan


def chat_of(messages: Sequence[ChatMessage], fields: ChatFields) -> generation_pb2.Chat:
    """Raises InvalidRequest."""
    goes_on = bool(fields.continue_final_message)
    if fields.add_generation_prompt is not None and fields.add_generation_prompt == goes_on:
        raise InvalidRequest("add_generation_prompt", f"must be {str(not goes_on).lower()}")
    chat = generation_pb2.Chat(
        messages=map(to_message, messages),
        continue_final_message=goes_on,
        template_arguments=template_arguments(fields.chat_template_kwargs, fields.reasoning_effort),
    )
    add_tools(chat, [tool.function for tool in fields.tools or ()], None, None)
    return chat


def to_message(message: ChatMessage) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(
        role=message.role,
        content=message.content or "",
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=[
            generation_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ],
    )


def chat_names(messages: Sequence[ChatMessage], tools: Sequence[ChatTool] | None) -> list[tuple[str, str]]:
    """What stands for the core's names of a chat's fields; see `router.openai.errors.renamed`."""
    names = []
    for index, message in enumerate(messages):
        for number in range(len(message.tool_calls or ())):
            ours, theirs = f"chat.messages[{index}].tool_calls[{number}]", f"messages[{index}].tool_calls[{number}]"
            names += [(f"{ours}.id", f"{theirs}.id"), (f"{ours}.", f"{theirs}.function.")]
    names += [(f"chat.tools[{index}].", f"tools[{index}].function.") for index in range(len(tools or ()))]
    return [
        *names,
        ("chat.messages", "messages"),
        ("chat.tools", "tools"),
        *TOOL_CHOICE_NAMES,
        ("chat.continue_final_message", "continue_final_message"),
        ("chat.template_arguments", "chat_template_kwargs"),
        ("chat", "messages"),
    ]


class ChatFormat:
    """How the answer to one request looks."""

    object = "chat.completion"
    id_prefix = "chatcmpl-"
    discards = False

    def __init__(self, body: ChatRequest, plan: Plan, texts: TokenTexts) -> None:
        self._plan = plan
        self._texts = texts
        self._prompt_logprobs = body.prompt_logprobs
        self._begun: set[int] = set()
        self._tools: ToolPlan | None = None
        self._parsers: list[ToolCallParser] = []
        self._calling: set[int] = set()
        kind = f"{self.object}.chunk" if plan.stream else self.object
        head = {"id": self.id_prefix + plan.request_id, "object": kind, "created": plan.created, "model": plan.model}
        self._head = json.dumps(head)[:-1]
        self._tail = USAGE_COMES if plan.with_usage else NO_USAGE
        self._running = RunningUsage() if plan.with_running_usage else None

    def begin(self, number: int, call: Call) -> None:
        """See `router.openai.exchange.Format`."""
        self._tools = call.request.tools
        if self._tools is not None:
            self._parsers = [self._tools.parser() for _ in call.samples]
        if self._running is not None:
            self._running.begin(number, call)

    def event(self, number: int, sample: int, chunk: Chunk) -> str:
        """The events of a chunk of a sample; empty if there is nothing to tell. `number` is 0: it is one prompt."""
        events = ""
        if self._running is not None:
            self._tail = self._running.add(number, sample, chunk)
        if sample not in self._begun:
            if not chunk.token_ids and chunk.end is None:
                return ""
            self._begun.add(sample)
            first = "null" if self._parsers else '""'
            events = self._event(sample, f'{{"role":"assistant","content":{first}}}')
        logprobs = "null"
        if chunk.logprobs is not None and chunk.token_ids:
            logprobs = json.dumps({"content": chat_content(chunk.logprobs, chunk.token_ids, self._texts)})
        ended = chunk.end is not None and chunk.end.outcome.error is None
        if self._parsers:
            deltas = self._deltas(sample, chunk.text, ended)
        else:
            deltas = [f'{{"content":{json.dumps(chunk.text)}}}'] if chunk.text else []
        if logprobs != "null" and not deltas:  # its text is held back, or it has none
            deltas = ["{}" if self._parsers else '{"content":""}']
        for delta in deltas:
            events += self._event(sample, delta, logprobs)
            logprobs = "null"
        if chunk.end is not None and ended:
            reason = finish_reason(chunk.end, called=sample in self._calling)
            events += self._event(sample, "{}", reason=f'"{reason}"')
        return events

    def _deltas(self, sample: int, text: str, ended: bool) -> list[str]:
        """What a text says, where tools may be called."""
        parser, deltas = self._parsers[sample], []
        for event in [*parser.feed(text), *(parser.finish() if ended else ())]:
            match event:
                case Content(piece):
                    deltas.append(json.dumps({"content": piece}))
                case CallBegin(index, name, call_id):
                    self._calling.add(sample)
                    deltas.append(json.dumps({"tool_calls": [{"index": index, **self._call(name, "", call_id)}]}))
                case CallArguments(index, piece):
                    deltas.append(json.dumps({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
        return deltas

    def _call(self, name: str, arguments: str, call_id: str) -> dict[str, Any]:
        assert self._tools is not None
        function = {"name": name, "arguments": arguments}
        return {"id": call_id or self._tools.new_id(), "type": "function", "function": function}

    def _event(self, index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{self._tail}'
        )

    def end(self, usage: Usage) -> str:
        """See `router.openai.exchange.Format`."""
        if not self._plan.with_usage:
            return DONE
        return f'data: {self._head},"choices":[],"usage":{json.dumps(usage.to_dict())}}}\n\n{DONE}'

    def failure(self, error: RequestError) -> str:
        """See `router.openai.exchange.Format`."""
        return ""

    def answer(self, collected: list[Collected], usage: Usage) -> bytes:
        """The whole answer, without a stream."""
        (part,) = collected
        self._tools = part.tools
        choices = json.dumps([self._choice(index, output) for index, output in enumerate(part.outputs)])
        more = ""
        if self._prompt_logprobs is not None:
            more = f',"prompt_logprobs":{json.dumps(prompt_entries(part.prompt, part.prompt_logprobs, self._texts))}'
        return f'{self._head},"choices":{choices},"usage":{json.dumps(usage.to_dict())}{more}}}'.encode()

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        logprobs, said = output.logprobs, Answer(output.text)
        if self._tools is not None:
            parser, said = self._tools.parser(), Answer()
            said.add([*parser.feed(output.text), *parser.finish()])
        calls = [self._call(call.name, call.arguments, call.call_id) for call in said.calls]
        message = {"role": "assistant", "content": said.content or (None if calls else ""), "refusal": None}
        assert output.end is not None
        return {
            "index": index,
            "message": message | {"tool_calls": calls} if calls else message,
            "logprobs": None
            if logprobs is None
            else {"content": chat_content(logprobs, output.token_ids, self._texts), "refusal": None},
            "finish_reason": finish_reason(output.end, called=bool(calls)),
        }
