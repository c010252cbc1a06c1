"""Tools as OpenAI's clients describe them, in chats and in responses, and what the core's messages make of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pdcore.errors import InvalidRequest
from protos import generation_pb2
from router.openai.parsing import Message, check_names

_MODES = {
    "auto": generation_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": generation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
TOOL_CHOICE_NAMES = (("chat.tool_choice*", "tool_choice"),)
"""What stands for the core's names of it; see `router.openai.errors.renamed`."""
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


def _name(value: object, *path: str | int, nested: bool, whole: bool = False) -> str:
    """The name in ``{"type": "function", ...}``.

    Args:
        path: where that stands in the choice.
        nested: it is in an object of its own, as in chats. whole: the rest of the tool may stand there as well.
    """
    if isinstance(value, dict) and value.get("type") == "function":
        inner = value.get("function") if nested else value
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            known = Function.model_fields if whole else ("name",)
            if nested:
                check_names(value, ("type", "function"), *path)
                check_names(inner, known, *path, "function")
            else:
                check_names(value, ("type", *known), *path)
            return str(inner["name"])
    raise PydanticCustomError("tool_choice", _CHOICES)


def _choice(value: object, *, nested: bool) -> generation_pb2.ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return generation_pb2.ToolChoice(mode=_MODES[value])
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value, nested=nested)
    return generation_pb2.ToolChoice(mode=_MODES["required"], names=[_name(value, nested=nested)])


def _allowed(value: dict[str, Any], *, nested: bool) -> generation_pb2.ToolChoice:
    allowed = value.get("allowed_tools") if nested else value
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(tools, list) or not tools:
        raise PydanticCustomError("tool_choice", _CHOICES)
    if allowed.get("mode") not in ("auto", "required"):
        raise PydanticCustomError("tool_choice", _CHOICES)
    if nested:
        check_names(value, ("type", "allowed_tools"))
        check_names(allowed, ("mode", "tools"), "allowed_tools")
    else:
        check_names(value, ("type", "mode", "tools"))
    path = ("allowed_tools", "tools") if nested else ("tools",)
    names = [_name(tool, *path, index, nested=nested, whole=True) for index, tool in enumerate(tools)]
    return generation_pb2.ToolChoice(mode=_MODES[allowed["mode"]], names=names)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema(*, nested: bool) -> dict[str, Any]:
    kind, text = {"const": "function"}, {"type": "string"}
    if nested:
        function = _object(type=kind, function=_object(name=text))
        tool = _object(type=kind, function=_with_rest(_object(name=text)))
    else:
        function = _object(type=kind, name=text)
        tool = _with_rest(function)
    lists = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": tool, "minItems": 1}}
    allowed = _object(type={"const": "allowed_tools"}, **({"allowed_tools": _object(**lists)} if nested else lists))
    return {"anyOf": [{"enum": list(_MODES)}, function, allowed, {"type": "null"}]}


def _with_rest(named: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool where its name would do."""
    rest: dict[str, Any] = {name: {} for name in Function.model_fields if name != "name"}
    return named | {"properties": named["properties"] | rest}


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
