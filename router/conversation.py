"""A client's chat, checked, as chat templates know it: messages, tools, and what else a template asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from pdcore.errors import InvalidRequest
from protos import generation_pb2
from router.chat_template import Arguments, ChatTemplate, Conversation
from router.json_size import check_json_size
from router.tools.grammar import HALVES, encodable
from router.tools.tool import Choice, Tool, ToolUse

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_NAME_CHARS = 64
MAX_CALL_ID_CHARS = 128
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_ARGUMENTS_BYTES = 16 << 10
MAX_DEPTH = 64
"""Levels of objects and lists in JSON that a client sends."""

_TOOL_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CHOICES = {
    generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: Choice.AUTO,
    generation_pb2.TOOL_CHOICE_MODE_AUTO: Choice.AUTO,
    generation_pb2.TOOL_CHOICE_MODE_NONE: Choice.NONE,
    generation_pb2.TOOL_CHOICE_MODE_REQUIRED: Choice.REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A checked chat. `use`: of its tools; None if it has none."""

    conversation: Conversation
    use: ToolUse | None


def read_chat(
    chat: generation_pb2.Chat, template: ChatTemplate | None, max_chars: int, max_messages: int
) -> ChatInput:
    """Check a chat.

    Args:
        template: the model's; None if it has none. max_chars: of all its texts together. max_messages: that it may
            have.

    Raises:
        InvalidRequest: see generation.proto for what is allowed.
    """
    if template is None:
        raise InvalidRequest(
            "chat",
            "this model's tokenizer has no chat template, nor is there a router.chat_template: write the messages "
            "into prompt or token_ids",
        )
    _check_counts(chat, max_messages)
    chars = _chars(chat)
    if chars > max_chars:  # before any JSON is read
        raise InvalidRequest("chat", f"{chars} characters cannot fit into the context of {max_messages} tokens")
    check_json_size("chat", *_json_texts(chat))
    use = _tool_use(chat, template)
    messages = [_message(index, entry, template) for index, entry in enumerate(chat.messages)]
    if chat.continue_final_message:
        last = chat.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.content:
            problem = "needs a last message with the role assistant that has content and calls no tool"
            raise InvalidRequest("chat.continue_final_message", problem)
    told = () if use is None or use.choice is Choice.NONE else use.tools
    return ChatInput(
        Conversation(
            messages=tuple(messages),
            tools=tuple(_described(tool) for tool in told),
            variables=_variables(chat.template_arguments, template),
            continue_final=chat.continue_final_message,
            chars=chars,
        ),
        use,
    )


def _check_counts(chat: generation_pb2.Chat, max_messages: int) -> None:
    """How many there are of everything, before any of it is looked at: a message has room for millions."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", "must have at least one message")
    if len(chat.messages) > max_messages:  # each is one token at least
        raise InvalidRequest(
            "chat.messages", f"must be at most the context of {max_messages} tokens, got {len(chat.messages)}"
        )
    calls = 0
    for index, message in enumerate(chat.messages):
        _check_count(f"chat.messages[{index}].tool_calls", message.tool_calls, MAX_TOOL_CALLS)
        calls += len(message.tool_calls)
    if calls > max_messages:  # each of these, too
        problem = f"must have at most {max_messages} tool calls together, one for each token of the context"
        raise InvalidRequest("chat.messages", f"{problem}, got {calls}")
    _check_count("chat.tools", chat.tools, MAX_TOOLS)
    _check_count("chat.tool_choice.names", chat.tool_choice.names, MAX_TOOLS)


def _check_count(field: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(field, f"must be at most {limit}, got {len(values)}")


def _chars(chat: generation_pb2.Chat) -> int:
    """Of everything that may come into the prompt."""
    count = len(chat.template_arguments)
    for message in chat.messages:
        count += len(message.content)
        for call in message.tool_calls:
            count += len(call.name) + len(call.arguments)
    for tool in chat.tools:
        count += len(tool.name) + len(tool.description) + len(tool.parameters)
    return count


def _json_texts(chat: generation_pb2.Chat) -> Iterator[bytes]:
    """All that is going to be read as JSON."""
    yield chat.template_arguments.encode()
    for message in chat.messages:
        for call in message.tool_calls:
            yield call.arguments.encode()
    for tool in chat.tools:
        yield tool.parameters.encode()


def _message(index: int, entry: generation_pb2.ChatMessage, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates know it."""
    field = f"chat.messages[{index}]"
    if entry.role not in ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(ROLES)}, got {entry.role[:32]!r}")
    _check_length(f"{field}.name", entry.name, MAX_NAME_CHARS)
    _check_length(f"{field}.tool_call_id", entry.tool_call_id, MAX_CALL_ID_CHARS)
    if entry.tool_call_id and entry.role != "tool":
        raise InvalidRequest(f"{field}.tool_call_id", "belongs to the role tool")
    role = "system" if entry.role == "developer" and not template.knows_developers else entry.role
    message: dict[str, Any] = {"role": role, "content": entry.content}
    if entry.name:
        message["name"] = entry.name
    if entry.tool_call_id:
        message["tool_call_id"] = entry.tool_call_id
    if entry.tool_calls:
        message["tool_calls"] = _tool_calls(f"{field}.tool_calls", entry, template)
        if not entry.content and template.wants_none:
            message["content"] = None
    return message


def _tool_calls(field: str, entry: generation_pb2.ChatMessage, template: ChatTemplate) -> list[dict[str, Any]]:
    if entry.role != "assistant":
        raise InvalidRequest(field, "belong to the role assistant")
    if not template.uses_tool_calls:
        raise InvalidRequest(field, "this model's chat template knows of no tool calls")
    calls = []
    for index, call in enumerate(entry.tool_calls):
        if not call.name:
            raise InvalidRequest(f"{field}[{index}].name", "must not be empty")
        _check_length(f"{field}[{index}].name", call.name, 4 * MAX_NAME_CHARS)  # the model may have made it up
        _check_length(f"{field}[{index}].id", call.id, MAX_CALL_ID_CHARS)
        function = {"name": call.name, "arguments": _call_arguments(call.arguments)}
        calls.append({"type": "function", "id": call.id, "function": function})
    return calls


def _call_arguments(text: str) -> Arguments | str:
    """An object, which templates go through; what the model wrote wrong stays the text that it is."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return Arguments(value) if isinstance(value, dict) and not _too_deep(value) else text


def _tool_use(chat: generation_pb2.Chat, template: ChatTemplate) -> ToolUse | None:
    choice = _CHOICES.get(chat.tool_choice.mode)
    if choice is None:
        problem = f"must be one of the values of ToolChoiceMode, got {chat.tool_choice.mode}"
        raise InvalidRequest("chat.tool_choice.mode", problem)
    if not chat.tools:
        if choice is Choice.REQUIRED or chat.tool_choice.names:
            raise InvalidRequest("chat.tool_choice", "needs tools")
        return None
    if not template.uses_tools and choice is not Choice.NONE:
        raise InvalidRequest("chat.tools", "this model's chat template knows of no tools, so it would not see them")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(chat.tools))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"chat.tools[{index}].name", f"{name!r} is the name of another tool as well")
    for index, name in enumerate(chat.tool_choice.names):
        if name not in names:
            problem = f"must be one of the tools ({', '.join(names)}), got {name[:MAX_NAME_CHARS]!r}"
            raise InvalidRequest(f"chat.tool_choice.names[{index}]", problem)
    several = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return ToolUse(tools, choice, tuple(chat.tool_choice.names), several)


def _tool(index: int, tool: generation_pb2.Tool) -> Tool:
    field = f"chat.tools[{index}]"
    if _TOOL_NAME.fullmatch(tool.name) is None:
        problem = f"must have 1 to {MAX_NAME_CHARS} letters, digits, _ or -, got {tool.name[:MAX_NAME_CHARS]!r}"
        raise InvalidRequest(f"{field}.name", problem)
    parameters: Mapping[str, Any] = {}
    if tool.parameters.strip():
        parameters = _object(f"{field}.parameters", tool.parameters, MAX_SCHEMA_BYTES)
        if parameters and parameters.get("type", "object") != "object":
            raise InvalidRequest(f"{field}.parameters", "must be the schema of an object")
    description = tool.description if tool.HasField("description") else None
    return Tool(tool.name, description, parameters, tool.strict)


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as templates know it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _variables(text: str, template: ChatTemplate) -> dict[str, Any]:
    field = "chat.template_arguments"
    if not text.strip():
        return {}
    values = _object(field, text, MAX_ARGUMENTS_BYTES)
    for name in values:
        if _VARIABLE.fullmatch(name) is None:
            raise InvalidRequest(field, f"{name[:MAX_NAME_CHARS]!r} is not the name of a variable")
        if name in template.reserved:
            raise InvalidRequest(field, f"{name} is set by the router")
    return values


def _object(field: str, text: str, max_bytes: int) -> dict[str, Any]:
    """A JSON object of bounded size and depth."""
    size = len(text.encode())
    if size > max_bytes:
        raise InvalidRequest(field, f"must have at most {max_bytes} bytes, got {size}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise _deep(field) from None
    except ValueError as error:
        raise InvalidRequest(field, f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    if _too_deep(value):
        raise _deep(field)
    if "\\u" in text and not encodable(json.dumps(value, ensure_ascii=False)):
        raise InvalidRequest(field, HALVES)
    return value


def _deep(field: str) -> InvalidRequest:
    return InvalidRequest(field, f"must be at most {MAX_DEPTH} levels deep")


def _too_deep(value: object) -> bool:
    level: Sequence[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            part
            for entry in level
            if isinstance(entry, dict | list)
            for part in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return False
    return True


def _check_length(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(field, f"must have at most {limit} characters, got {len(text)}")
