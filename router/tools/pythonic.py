"""Calls written as Python: ``[f(a=1, b="x"), g()]``, as Llama 3.2, Llama 4 and Gemma write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection

from router.tools.reader import MAX_NAME_CHARS, ReaderParser, Step

MARKERS = ("<|python_start|>", "<|python_tag|>")
_END = "<|python_end|>"
_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_.-]")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_OPENING, _CLOSING = "([{", ")]}"


class PythonicCalls(ReaderParser):
    """A list of calls at the beginning of the output, or behind a marker.

    A call is given out when it is complete, since only then can it be told whether Python can read it.

    Args:
        names: that may be called: without a marker only they tell a call from text in brackets.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        super().__init__()

    def _run(self) -> Step[None]:
        reader = self.reader
        yield from reader.space()
        if not (yield from reader.at("[")) or not (yield from self._list()):
            reader.pos = 0
        while (found := (yield from reader.content_before(MARKERS))) is not None:
            marker, space = found
            yield from reader.space()
            if (yield from reader.at("[")) and (yield from self._list()):
                yield from reader.space()
                if not (yield from reader.at(_END)):
                    reader.pos = 0
            else:
                reader.content_again(space + marker)

    def _list(self) -> Step[bool]:
        """Read a list behind its bracket; False, and nothing given out, if it does not begin with a call."""
        reader, called = self.reader, False
        while True:
            yield from reader.space()
            if not (yield from self._call()):
                break
            called = True
            reader.commit()
            yield from reader.space()
            if (yield from reader.at("]")):
                reader.commit()
                return True
            if not (yield from reader.at(",")):
                break
        if called:
            reader.pos = 0  # behind the last call
        return called

    def _call(self) -> Step[bool]:
        reader, start = self.reader, self.reader.pos
        while (character := (yield from reader.peek())) and _NAME_CHARACTER.match(character):
            reader.pos += 1
            if reader.pos - start > MAX_NAME_CHARS:
                return False
        name = reader.text[start : reader.pos]
        yield from reader.space()
        if name not in self._names or (yield from reader.peek()) != "(":
            return False
        begin = reader.pos
        if not (yield from self._brackets()):
            return False
        arguments = _arguments(reader.text[begin : reader.pos])
        if arguments is None:
            return False
        reader.begin(name)
        reader.arguments(arguments)
        return True

    def _brackets(self) -> Step[bool]:
        """Read from a bracket to the one that closes it. False if the text ends before."""
        reader, depth, quote = self.reader, 0, ""
        while character := (yield from reader.peek()):
            reader.pos += 1
            if quote:
                if character == "\\":
                    if not (yield from reader.has(1)):
                        return False
                    reader.pos += 1
                elif (len(quote) == 1 and character == quote) or (
                    len(quote) == 3 and character == quote[0] and (yield from reader.at(quote[:2]))
                ):
                    quote = ""
            elif character in "\"'":
                quote = character
                if (yield from reader.at(2 * character)):  # three open a long string; two are an empty one
                    quote = 3 * character
                elif (yield from reader.at(character)):
                    quote = ""
            elif character in _OPENING:
                depth += 1
            elif character in _CLOSING:
                depth -= 1
                if depth == 0:
                    return True
        return False


def _arguments(text: str) -> str | None:
    """``(a=1, b=[True])`` as JSON; None if that is no list of keyword arguments that JSON could say."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        if any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> object:
    """The value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key must be a string")
