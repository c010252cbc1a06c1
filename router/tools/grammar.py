"""Grammars of outputs that call tools, for structured output: calls that are wanted, and arguments that have to fit.

Written as llguidance reads them: Lark with ``%json`` for a JSON schema and ``<[7]>`` for the token 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.tools.formats import Spelling
from router.tools.tool import Tool

_PLACES = re.compile(r"(\$NAME|\$ARGS|\$INDEX)")
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
"""Bounded white space, as in every JSON that a request may ask for."""
_NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keys of a schema whose value has a schema under each name."""
_DATA = frozenset(("enum", "const"))

HALVES = "must not have halves of characters"


def calls_grammar(
    spelling: Spelling,
    tools: Sequence[Tool],
    tokens: Mapping[str, int],
    *,
    several: bool,
    content: str | None,
) -> str:
    """The grammar of an output.

    Args:
        tools: that may be called, one at least. tokens: words that are tokens of their own, and their ids.
        several: more than one call may be made.
        content: what the output may be instead of calls: a JSON schema, an empty string for text (also before
            calls), None for nothing.
    """
    writer = _Writer(tokens)
    rules = [f"args_{index}: %json {arguments_schema(tool)}" for index, tool in enumerate(tools)]
    rules += [
        f"call_{index}: {writer.call(spelling.call, tool.name, f'args_{index}')}" for index, tool in enumerate(tools)
    ]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f" ({writer.words(spelling.between)} call)*" if several else ""
    calls, closing = f"call{more}", writer.words(spelling.closing)
    rules.append(f"calls: {writer.words(spelling.opening)} {calls} {closing}")
    if content is None:
        start = "calls"
    elif content:
        rules.append(f"content: %json {json_schema(content)}")
        start = "content | calls"
    elif not spelling.trigger:
        # What begins like a call is one.
        rules.append(r"TEXT: /[ \t\r\n]*([^{\[ \t\r\n](.|\n)*)?/")
        start = "TEXT | calls"
    elif spelling.trigger in tokens:
        rules.append(r"TEXT: /(.|\n)*/")  # no token of its own is text
        start = "TEXT | TEXT calls"
    else:
        rules += _text_before(spelling, tools, writer, more, closing)
        start = "TEXT | head first"
    return "\n".join(["%llguidance {}", f"start: {start}", *rules]) + "\n"


def _text_before(spelling: Spelling, tools: Sequence[Tool], writer: _Writer, more: str, closing: str) -> list[str]:
    """Rules for text and calls whose trigger is text too: behind it a call has to follow."""
    trigger = spelling.trigger
    word = json.dumps(trigger, ensure_ascii=False)
    rules = [r"ANY: /(.|\n)*/", f"TEXT: ANY & ~(ANY {word} ANY)", f"head[lazy]: ANY {word}"]
    if spelling.opening:
        opening = writer.words(spelling.opening.removeprefix(trigger))
        return [*rules, f"first: {opening} call{more} {closing}"]
    behind = spelling.call.removeprefix(trigger)
    for index, tool in enumerate(tools):
        rules.append(f"first_{index}: {writer.call(behind, tool.name, f'args_{index}')}")
    options = " | ".join(f"first_{index}" for index in range(len(tools)))
    return [*rules, f"first: ({options}){more} {closing}"]


class _Writer:
    """Words as terms of a grammar: those that are tokens by their id, all others as text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        longest = sorted(tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest))})") if tokens else None

    def words(self, text: str) -> str:
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def call(self, spelling: str, name: str, arguments: str) -> str:
        terms: list[str] = []
        text = ""
        for part in _PLACES.split(spelling):
            if part == "$NAME":
                text += name
            elif part in ("$ARGS", "$INDEX"):
                terms += [self.words(text), arguments if part == "$ARGS" else "/[0-9]{1,3}/"]
                text = ""
            else:
                text += part
        return " ".join(term for term in (*terms, self.words(text)) if term)


def arguments_schema(tool: Tool) -> str:
    """The schema of a tool's arguments as JSON, without notes for readers.

    Arguments that nothing says may be there are left out. A tool that is not strict is taken as far as the library
    understands its schema.
    """
    schema = dict(_without_notes(tool.parameters))
    schema.setdefault("type", "object")
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    elif not tool.parameters:
        schema["additionalProperties"] = False
    return _with_options(schema, lenient=not tool.strict)


def json_schema(schema: str) -> str:
    """A schema for an answer, to be a part of a grammar. Raises ValueError if it is no JSON object, or no UTF-8."""
    parsed = json.loads(schema)
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    written = _with_options(dict(_without_notes(parsed)), lenient=False)
    if not encodable(written):
        raise ValueError(HALVES)
    return written


def encodable(text: str) -> bool:
    """Whether a text is one in UTF-8. JSON can spell halves of characters (``\\ud800``), which are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_options(schema: dict[str, Any], *, lenient: bool) -> str:
    options = schema.get("x-guidance")
    if not isinstance(options, dict):
        options = {}
    if "whitespace_flexible" not in options:
        options = _JSON_OPTIONS | options
    if lenient:
        options = {"lenient": True} | options
    return json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)


def _without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _part(key, value) for key, value in schema.items() if key not in _NOTES}


def _part(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _without_notes(part) if isinstance(part, Mapping) else part for name, part in value.items()}
    if isinstance(value, Mapping):
        return _without_notes(value)
    if isinstance(value, list):
        return [_without_notes(part) if isinstance(part, Mapping) else part for part in value]
    return value
