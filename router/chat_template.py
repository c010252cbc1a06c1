"""Chat messages to a prompt, by the Jinja template that a model ships.

Templates are foreign code: they run in Jinja's immutable sandbox, with the helpers that model publishers rely on.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdcore.errors import InvalidRequest, ModelError


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class Arguments(dict[str, Any]):
    """Arguments of a tool call. Some templates go through an object, others put JSON text between their own."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template makes a prompt of.

    Attributes:
        messages: with ``role`` and ``content``, and where there are some ``name``, ``tool_call_id`` and
            ``tool_calls``, whose arguments are `Arguments`.
        tools: with ``type`` and ``function`` (``name``, ``description``, ``parameters``).
        variables: more of the template's variables. continue_final: the output goes on with the last message.
        chars: of all texts together.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    chars: int = 0


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source. special_tokens: names such as ``bos_token`` and their text, as templates use them.

    Attributes:
        uses_tools, uses_tool_calls: the template looks at tools, and at the calls in messages.
        knows_developers: it speaks of that role. wants_none: it asks whether content is none.
        reserved: names of variables that are set here.

    Raises:
        ModelError: the template has a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        helpers: dict[str, Callable[..., object]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        environment.globals.update(helpers)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.uses_tools = any(
            name.name == "tools" and name.ctx == "load" for name in tree.find_all(jinja2.nodes.Name)
        )
        self.uses_tool_calls = "tool_calls" in source
        self.knows_developers = "developer" in source
        self.wants_none = re.search(r"content(['\"]\])? is none", source) is not None
        self.reserved = frozenset(("messages", "tools", "add_generation_prompt", *helpers, *special_tokens))

    def render(self, conversation: Conversation) -> str:
        """The prompt that asks for the next assistant message, or for the rest of the last one.

        Raises:
            InvalidRequest: the template does not accept this conversation.
        """
        messages = [dict(message) for message in conversation.messages]
        # What comes behind the last message is found, and left out, by a mark that nobody can have written.
        mark = f"\x02{secrets.token_hex(8)}\x03" if conversation.continue_final else ""
        if mark:
            messages[-1]["content"] += mark
        try:
            text = self._template.render(
                {
                    "documents": None,
                    **conversation.variables,
                    **self._special_tokens,
                    "messages": messages,
                    "tools": list(conversation.tools) or None,
                    "add_generation_prompt": not mark,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise InvalidRequest("chat", f"the model's chat template refuses these messages: {error}") from error
        if not mark:
            return text
        if text.count(mark) != 1:
            problem = "this model's chat template does not end with the last message as it is"
            raise InvalidRequest("chat.continue_final_message", problem)
        return text[: text.index(mark)]
