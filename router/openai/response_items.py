"""What the input of a response may consist of, and the chat that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from protos import generation_pb2
from router.openai.fields import Ignored
from router.openai.parsing import Message

BETWEEN_PARTS = "\n"
_TYPES = ("message", "function_call", "function_call_output")


class TextPart(Message):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None
    prompt_cache_breakpoint: Ignored = None
    cache_control: Ignored = None


def _kind_of_content(value: object) -> str:
    return "[text]" if isinstance(value, str) else "[parts]"


Content = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("[parts]")],
    Discriminator(_kind_of_content),
]


class MessageItem(Message):
    """Something that was said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCallItem(Message):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON text of an object, as the model wrote it.")
    parsed_arguments: Ignored = None
    id: Ignored = None
    status: Ignored = None


class FunctionCallOutputItem(Message):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Ignored = None
    status: Ignored = None


def _kind_of_item(value: object) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else ""
    return f"[{kind}]" if kind in _TYPES else None


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item",
        custom_error_message=f"must be an item of type {', '.join(_TYPES[:-1])} or {_TYPES[-1]}",
    ),
]
Input = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[Item], Field(fail_fast=True, min_length=1), Tag("[items]")],
    Discriminator(lambda value: "[text]" if isinstance(value, str) else "[items]"),
]


class InputChat:
    """The messages of an input, and which of its items each comes from.

    Attributes:
        names: what stands for the core's names of fields; see `router.openai.errors.renamed`.
    """

    def __init__(self, instructions: str | None, given: str | Sequence[Any]) -> None:
        self.messages: list[generation_pb2.ChatMessage] = []
        self._names: list[tuple[str, str]] = []
        self._call_names: list[tuple[str, str]] = []
        self._all_calls: list[tuple[str, str]] = []
        if instructions:
            self._add("instructions", role="system", content=instructions)
        if isinstance(given, str):
            self._add("input", role="user", content=given)
            given = ()
        for index, item in enumerate(given):
            name = f"input[{index}]"
            match item:
                case MessageItem():
                    self._add(name, role=item.role, content=_text(item.content))
                case FunctionCallItem():
                    self._add_call(name, item)
                case FunctionCallOutputItem():
                    self._add(name, role="tool", content=_text(item.output), tool_call_id=item.call_id)
        self.names = [*self._call_names, *self._all_calls, *self._names, ("chat.messages", "input")]

    def _add(self, name: str, **fields: Any) -> None:
        ours = f"chat.messages[{len(self.messages)}]"
        self._names += [(f"{ours}.tool_call_id", f"{name}.call_id"), (ours, name)]
        self.messages.append(generation_pb2.ChatMessage(**fields))

    def _add_call(self, name: str, item: FunctionCallItem) -> None:
        """Calls that follow each other, or what was said with them, are one message."""
        if not self.messages or self.messages[-1].role != "assistant":
            self._add(name, role="assistant")
        message = self.messages[-1]
        calls = f"chat.messages[{len(self.messages) - 1}].tool_calls"
        ours = f"{calls}[{len(message.tool_calls)}]"
        self._call_names += [(f"{ours}.id", f"{name}.call_id"), (ours, name)]
        if not message.tool_calls:  # what is said of all of them is said of the first
            self._all_calls.append((calls, name))
        message.tool_calls.add(id=item.call_id, name=item.name, arguments=item.arguments)


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else BETWEEN_PARTS.join(part.text for part in content)
