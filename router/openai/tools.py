"""Tools as OpenAI's clients describe them, in chats and in responses, and what the core's messages make of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pdcore.errors import InvalidRequest
from protos import generation_pb2
from router.openai.parsing import Message

_MODES = {
    "auto": generation_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": generation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_CHOICES = "must be none, auto, required, one function or allowed_tools"


class Function(Message):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of an object; null: it has none."
    )
    strict: bool | None = Field(default=None, description="Arguments have to fit the schema; default false.")


class ChatTool(Message):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class ResponseTool(Message):
    """A tool of a response: functions only."""

    type: Literal["function"]  # first, so that it is what is told of other kinds
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of an object; null: it has none."
    )
    strict: bool | None = Field(default=None, description="Arguments have to fit the schema; default false.")


def tool_of(function: Function | ResponseTool) -> generation_pb2.Tool:
    return generation_pb2.Tool(
        name=function.name,
        description=function.description,
        parameters="" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False),
        strict=bool(function.strict),
    )


def _name(value: object, *, nested: bool) -> str:
    """The name in ``{"type": "function", ...}``; `nested`: it is in an object of its own, as in chats."""
    if isinstance(value, dict) and value.get("type") == "function":
        inner = value.get("function") if nested else value
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            return str(inner["name"])
    raise PydanticCustomError("tool_choice", _CHOICES)


def _choice(value: object, *, nested: bool) -> generation_pb2.ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return generation_pb2.ToolChoice(mode=_MODES[value])
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools") if nested else value
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if (
            isinstance(allowed, dict)
            and isinstance(tools, list)
            and tools
            and allowed.get("mode") in ("auto", "required")
        ):
            names = [_name(tool, nested=nested) for tool in tools]
            return generation_pb2.ToolChoice(mode=_MODES[allowed["mode"]], names=names)
        raise PydanticCustomError("tool_choice", _CHOICES)
    return generation_pb2.ToolChoice(mode=_MODES["required"], names=[_name(value, nested=nested)])


def _schema(*, nested: bool) -> dict[str, Any]:
    name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    inner: dict[str, Any] = {"function": name} if nested else {"name": {"type": "string"}}
    function = {
        "type": "object",
        "properties": {"type": {"const": "function"}, **inner},
        "required": ["type", *inner],
    }
    lists = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": function, "minItems": 1}}
    allowed: dict[str, Any] = {"type": "object", "properties": lists, "required": list(lists)}
    if nested:
        allowed = {"type": "object", "properties": {"allowed_tools": allowed}, "required": ["allowed_tools"]}
    allowed["properties"] = {"type": {"const": "allowed_tools"}, **allowed["properties"]}
    allowed["required"] = ["type", *allowed["required"]]
    return {"anyOf": [{"enum": list(_MODES)}, function, allowed, {"type": "null"}]}


ChatToolChoice = Annotated[
    Any, BeforeValidator(lambda value: _choice(value, nested=True)), WithJsonSchema(_schema(nested=True))
]
ResponseToolChoice = Annotated[
    Any, BeforeValidator(lambda value: _choice(value, nested=False)), WithJsonSchema(_schema(nested=False))
]


def add_tools(
    chat: generation_pb2.Chat,
    tools: Sequence[Function | ResponseTool],
    choice: generation_pb2.ToolChoice | None,
    parallel: bool | None,
) -> None:
    """Put tools, and how they may be used, into a chat."""
    chat.tools.extend(map(tool_of, tools))
    if choice is not None:
        chat.tool_choice.CopyFrom(choice)
        if choice.mode == generation_pb2.TOOL_CHOICE_MODE_REQUIRED and len(choice.names) == 1:
            parallel = False  # one function is one call
    if parallel is not None:
        chat.parallel_tool_calls = parallel


def check_readable(chat: generation_pb2.Chat, known: bool) -> None:
    """Raises InvalidRequest if calls that the model may make could not be told from its text.

    Args:
        known: whether the model's format of calls is known.
    """
    modes = (generation_pb2.TOOL_CHOICE_MODE_NONE, generation_pb2.TOOL_CHOICE_MODE_REQUIRED)
    if chat.tools and not known and chat.tool_choice.mode not in modes:
        problem = "the format in which this model calls tools is not known: router.tool_call_parser can name it"
        raise InvalidRequest("chat.tools", problem)
