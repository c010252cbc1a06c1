"""Calls written as tags, as Qwen3-Coder writes them; values are text, which the tool's schema gives a type."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from router.tools.reader import ReaderParser, Step

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


class XmlCalls(ReaderParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``, with line breaks.

    Args:
        schemas: JSON schema of the parameters of each tool, by its name.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        super().__init__()

    def _run(self) -> Step[None]:
        reader = self.reader
        while (found := (yield from reader.content_before((_CALL, _FUNCTION)))) is not None:
            word, space = found
            if word == _CALL:
                yield from reader.space()
            if (word == _FUNCTION or (yield from reader.at(_FUNCTION))) and (yield from self._call()):
                if word == _CALL:
                    yield from reader.space()
                    if not (yield from reader.at(_CALL_END)):
                        reader.pos = 0
                reader.commit()
            else:
                reader.content_again(space + word)

    def _call(self) -> Step[bool]:
        """Read a call behind ``<function=``; False, and nothing given out, if there is no name."""
        reader = self.reader
        name = yield from reader.before(">")
        if name is None or _NAME.fullmatch(name) is None:
            return False
        reader.begin(name)
        reader.commit()
        first, properties = True, _properties(self._schemas.get(name, {}))
        reader.arguments("{")
        while True:
            yield from reader.space()
            if not (yield from reader.at(_PARAMETER)):
                break
            key = yield from reader.before(">")
            if key is None:
                reader.pos = 0
                break
            reader.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            first = False
            if not (yield from self._value(properties.get(key, {}))):
                return True  # cut off
            reader.commit()
        if not (yield from reader.at(_FUNCTION_END)):
            reader.pos = 0
        reader.commit()
        reader.arguments("}")
        return True

    def _value(self, schema: object) -> Step[bool]:
        """Read a value up to its end, and give it out as JSON. False if the text ends before."""
        reader = self.reader
        yield from reader.at("\n")
        reader.commit()
        if not _only_text(schema):
            while (end := reader.text.find(_PARAMETER_END)) < 0:
                if reader.closed:
                    reader.arguments(reader.text)
                    reader.pos = len(reader.text)
                    return False
                yield
            reader.arguments(_json_of(reader.text[:end].removesuffix("\n"), schema))
            reader.pos = end + len(_PARAMETER_END)
            return True
        reader.arguments('"')
        ends = (f"\n{_PARAMETER_END}", _PARAMETER_END)
        while True:
            end = reader.text.find(_PARAMETER_END)
            if end >= 0:
                reader.arguments(_escaped(reader.text[:end].removesuffix("\n")) + '"')
                reader.pos = end + len(_PARAMETER_END)
                return True
            held = 0 if reader.closed else _held(reader.text, ends)
            reader.pos = len(reader.text) - held
            reader.arguments(_escaped(reader.text[: reader.pos]))
            reader.commit()
            if reader.closed:
                return False
            yield


def _held(text: str, words: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of one of the words."""
    longest = min(len(text), max(map(len, words)))
    for count in range(longest, 0, -1):
        if any(word.startswith(text[-count:]) for word in words):
            return count
    return 0


def _escaped(text: str) -> str:
    """As the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, object]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: object) -> frozenset[str] | None:
    """The JSON types that a schema names; None if it names none."""
    if not isinstance(schema, Mapping):
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            found = [_types(option) for option in options]
            return None if None in found else frozenset().union(*(types for types in found if types is not None))
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    )
    if values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    return None


def _only_text(schema: object) -> bool:
    """Whether the value is text whatever it says. So it is where nothing is known about it."""
    if not isinstance(schema, Mapping) or not schema:
        return True
    return _types(schema) == frozenset(("string",))


def _json_of(text: str, schema: object) -> str:
    """The value as JSON: of the schema's type if it can be read so, else as a string."""
    types = _types(schema)
    word = text.strip()
    if types is not None and "string" in types:
        return "null" if word in ("null", "None") and "null" in types else json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
