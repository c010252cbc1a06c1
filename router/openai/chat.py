"""``/v1/chat/completions``: what a request says, and what its answer looks like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pdcore.errors import InvalidRequest
from pdcore.logprobs import MAX_LOGPROBS
from protos import generation_pb2
from router.openai.collected import Collected, Output, finish_reason
from router.openai.fields import Count, GenerationFields, Ignored, param_names, ranged
from router.openai.logprobs import TokenTexts, chat_content, prompt_entries
from router.openai.parsing import Message
from router.openai.plan import Headers, Plan, begin_plan
from router.openai.usage import Usage
from router.stream import Chunk

BETWEEN_PARTS = "\n"
"""Between the text parts of a message; as at vLLM."""


def _text(value: object) -> str:
    """A text, or its parts, as a text."""
    if isinstance(value, str):
        return value
    problem = "must be a string, or a list of parts of type text"
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "{problem}", {"problem": problem})
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "{problem}", {"problem": problem})
        texts.append(part["text"])
    return BETWEEN_PARTS.join(texts)


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Text = Annotated[
    Any,
    BeforeValidator(_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}),
]


class ChatMessage(Message):
    """One message of a chat."""

    role: Literal["developer", "system", "user", "assistant"] = Field(
        description="developer is another word for system."
    )
    content: Text = Field(description="Text, or parts of it.")

    refused: ClassVar[Mapping[str, str]] = {
        name: "is not supported here" for name in ("name", "audio", "refusal", "function_call")
    }


class ChatRequest(GenerationFields):
    """A chat asks for its next message."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: Count | None = Field(default=None, description="The same as max_tokens.")
    logprobs: bool | None = Field(default=None, description="Of each token.")
    top_logprobs: Count | None = ranged("And of so many likeliest.", maximum=MAX_LOGPROBS)
    modalities: list[Literal["text"]] | None = None
    prediction: Ignored = None
    parallel_tool_calls: Ignored = None


def plan_chat(body: ChatRequest, headers: Headers, served_name: str) -> Plan:
    """Raises InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "may be set only if logprobs is true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens", "may not differ from max_completion_tokens; set one of them")
    plan, request = begin_plan(body, headers, served_name)
    names = [("chat.messages", "messages"), ("chat", "messages"), ("sampling.logprobs", "top_logprobs")]
    if body.max_completion_tokens is not None:
        request.sampling.max_tokens = body.max_completion_tokens
        names.append(("sampling.max_tokens", "max_completion_tokens"))
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    request.chat.messages.extend(to_message(message) for message in body.messages)
    plan.requests.append(request)
    plan.names.append([*names, *param_names(body)])
    return plan


def to_message(message: ChatMessage) -> generation_pb2.ChatMessage:
    role = "system" if message.role == "developer" else message.role
    return generation_pb2.ChatMessage(role=role, content=message.content)


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
        kind = f"{self.object}.chunk" if plan.stream else self.object
        head = {"id": self.id_prefix + plan.request_id, "object": kind, "created": plan.created, "model": plan.model}
        self._head = json.dumps(head)[:-1]
        self._tail = ',"usage":null}\n\n' if plan.with_usage else "}\n\n"

    def event(self, number: int, sample: int, chunk: Chunk) -> str:
        """The events of a chunk of a sample; empty if there is nothing to tell. `number` is 0: it is one prompt."""
        events = ""
        if sample not in self._begun:
            if not chunk.token_ids and chunk.end is None:
                return ""
            self._begun.add(sample)
            events = self._event(sample, '{"role":"assistant","content":""}')
        content = "null"
        if chunk.logprobs is not None and chunk.token_ids:
            content = json.dumps({"content": chat_content(chunk.logprobs, chunk.token_ids, self._texts)})
        if chunk.text or content != "null":
            events += self._event(sample, f'{{"content":{json.dumps(chunk.text)}}}', content)
        if chunk.end is not None and chunk.end.outcome.error is None:
            events += self._event(sample, "{}", reason=f'"{finish_reason(chunk.end)}"')
        return events

    def _event(self, index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{self._tail}'
        )

    def usage_event(self, usage: Usage) -> str:
        return f'data: {self._head},"choices":[],"usage":{json.dumps(usage.to_dict())}}}\n\n'

    def answer(self, collected: list[Collected], usage: Usage) -> bytes:
        """The whole answer, without a stream."""
        (part,) = collected
        choices = json.dumps([self._choice(index, output) for index, output in enumerate(part.outputs)])
        more = ""
        if self._prompt_logprobs is not None:
            more = f',"prompt_logprobs":{json.dumps(prompt_entries(part.prompt, part.prompt_logprobs, self._texts))}'
        return f'{self._head},"choices":{choices},"usage":{json.dumps(usage.to_dict())}{more}}}'.encode()

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        logprobs = output.logprobs
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None
            if logprobs is None
            else {"content": chat_content(logprobs, output.token_ids, self._texts), "refusal": None},
            "finish_reason": output.finish_reason,
        }
