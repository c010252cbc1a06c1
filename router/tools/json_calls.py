"""Calls written as JSON: Hermes and Qwen, Llama 3, Mistral, Granite; and those between tokens, DeepSeek and Kimi."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from router.tools.reader import MAX_NAME_CHARS, ReaderParser, Step

_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "function")
"""What some models write beside name and arguments."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


def arguments_of(value: str | None) -> str | None:
    """The arguments of a call whose value is this JSON: an object, such an object in a string, or nothing.

    Returns:
        JSON text; None if it is something else.
    """
    if value is None or value == "null":
        return "{}"
    if value.startswith('"'):
        try:
            value = str(json.loads(value, strict=False)).strip()
            inner = json.loads(value or "{}", strict=False)
        except (ValueError, RecursionError):
            return None
        return (value or "{}") if isinstance(inner, dict) else None
    return value if value.startswith("{") else None


class JsonCalls(ReaderParser):
    """Calls ``{"name": ..., "arguments": {...}}``, one or a list of them, behind a word that says so.

    ::

        text --marker--> call or list of calls --end word or nothing--> text ...

    Args:
        markers: words that come before calls. ends: words that may come behind them.
        separators: between calls that share one marker, where they are no list.
        bare: names; the output may also begin with a call without a marker, if that calls one of them.
    """

    def __init__(
        self,
        markers: Sequence[str],
        ends: Sequence[str] = (),
        *,
        separators: Sequence[str] = (),
        bare: Collection[str] = (),
    ) -> None:
        self._markers = markers
        self._ends = ends
        self._separators = separators
        self._bare = frozenset(bare)
        super().__init__()

    def _run(self) -> Step[None]:
        reader = self.reader
        if self._bare:
            yield from reader.space()
            if (yield from reader.peek()) in ("{", "[") and (yield from self._calls(self._bare)):
                reader.commit()
            else:
                reader.pos = 0
        while (found := (yield from reader.content_before(self._markers))) is not None:
            marker, space = found
            if (yield from self._behind(marker)):
                reader.commit()
            else:  # content, and so is what follows
                reader.content_again(space + marker)

    def _behind(self, marker: str) -> Step[bool]:
        """Read what is behind a marker; False, and nothing given out, if that is no call."""
        yield from self.reader.space()
        called = yield from self._calls(None)
        if called and self._ends:
            yield from self._end()
        return called

    def _end(self) -> Step[None]:
        """Read the end word, if it comes next."""
        self.reader.commit()
        yield from self.reader.space()
        if not (yield from self.reader.at(*self._ends)):
            self.reader.pos = 0

    def _calls(self, names: Collection[str] | None) -> Step[bool]:
        reader = self.reader
        if (yield from reader.at("[")):
            return (yield from self._list(names))
        if not (yield from self._call(names)):
            return False
        if self._separators:
            reader.commit()
            yield from self._others(names)
        return True

    def _others(self, names: Collection[str] | None) -> Step[None]:
        """Read separators and calls, as long as there are any."""
        reader = self.reader
        while True:
            yield from reader.space()
            if not (yield from reader.at(*self._separators)):
                break
            yield from reader.space()
            if not (yield from self._call(names)):
                break
            reader.commit()
        reader.pos = 0  # behind the last call

    def _list(self, names: Collection[str] | None) -> Step[bool]:
        """Read a list behind its bracket."""
        reader, called = self.reader, False
        while True:
            yield from reader.space()
            if not (yield from self._call(names)):
                break
            called = True
            reader.commit()
            yield from reader.space()
            if (yield from reader.at("]")):
                return True
            if not (yield from reader.at(",")):
                break
        if called:
            reader.pos = 0  # behind the last call
        return called

    def _call(self, names: Collection[str] | None) -> Step[bool]:
        """Read one call, and give it out as it comes. False, and nothing given out, if it is none.

        Args:
            names: those that may be called; None: any.
        """
        reader = self.reader
        if not (yield from reader.at("{")):
            return False
        name: str | None = None
        value: str | None = None
        begun = False
        while True:
            yield from reader.space()
            key = yield from reader.json_string(MAX_NAME_CHARS)
            if key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS):
                return begun
            yield from reader.space()
            if not (yield from reader.at(":")):
                return begun
            yield from reader.space()
            if key in _NAME_KEYS:
                name = yield from reader.json_string(MAX_NAME_CHARS)
                if not name or (names is not None and name not in names):
                    return begun
            elif key in _ARGUMENT_KEYS and name and not begun and (yield from reader.peek()) == "{":
                reader.begin(name)
                begun = True
                if (yield from reader.json_container(out=True)) is None:
                    return True
            else:
                other = yield from reader.json_value()
                if other is None:
                    return begun
                if key in _ARGUMENT_KEYS:
                    value = other
            yield from reader.space()
            if (yield from reader.at("}")):
                break
            if not (yield from reader.at(",")):
                return begun
        if begun:
            return True
        arguments = arguments_of(value)
        if not name or arguments is None:
            return False
        reader.begin(name)
        reader.arguments(arguments)
        return True


class MistralCalls(JsonCalls):
    """``[TOOL_CALLS]`` and a list of calls, or a name and its arguments: ``[TOOL_CALLS]name[ARGS]{...}``."""

    def __init__(self) -> None:
        super().__init__(("[TOOL_CALLS]",))

    def _behind(self, marker: str) -> Step[bool]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.peek()) in ("[", "{"):
            return (yield from self._calls(None))
        name = ""
        while (character := (yield from reader.peek())) and _NAME.fullmatch(character) and len(name) < MAX_NAME_CHARS:
            name += character
            reader.pos += 1
        yield from reader.space()
        if (yield from reader.at("[CALL_ID]")) and (yield from reader.before("[ARGS]")) is None:
            return False
        yield from reader.at("[ARGS]")
        yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            return False
        reader.begin(name)
        yield from reader.json_container(out=True)
        return True


class DelimitedCalls(ReaderParser):
    """Calls between tokens of their own: ``BEGIN header SEPARATOR arguments END``, and a frame around all of them.

    Args:
        frame: words around the calls. begin, separator, end: words of each.
    """

    def __init__(self, frame: tuple[str, str], begin: str, separator: str, end: str) -> None:
        self._frame = frame
        self._begin, self._separator, self._end = begin, separator, end
        super().__init__()

    def _run(self) -> Step[None]:
        reader = self.reader
        while (found := (yield from reader.content_before((self._frame[0], self._begin)))) is not None:
            word, space = found
            if word == self._frame[0]:
                yield from reader.space()
                if not (yield from reader.at(self._begin)):
                    reader.content_again(space + word)
                    continue
            if not (yield from self._call()):
                reader.content_again(space + word)
                continue
            reader.commit()
            yield from self._more()

    def _more(self) -> Step[None]:
        """Read the calls behind the first, and the end of the frame."""
        reader = self.reader
        while True:
            yield from reader.space()
            if (yield from reader.at(self._frame[1])):
                reader.commit()
                return
            if not (yield from reader.at(self._begin)) or not (yield from self._call()):
                reader.pos = 0
                return
            reader.commit()

    def _call(self) -> Step[bool]:
        reader = self.reader
        header = yield from reader.before(self._separator)
        if header is None:
            return False
        yield from reader.space()
        name, call_id = self._named(header)
        fence = False
        if (yield from reader.peek()) != "{":
            line = yield from reader.before("\n")
            if line is None or not (yield from reader.at("```json")):
                return False
            yield from reader.space()
            if (yield from reader.peek()) != "{":
                return False
            name, fence = line.strip(), True
        if _NAME.fullmatch(name) is None:
            return False
        reader.begin(name, call_id)
        if (yield from reader.json_container(out=True)) is None:
            return True
        yield from reader.space()
        if fence:
            yield from reader.at("```")
        if not (yield from reader.at(self._end)):
            reader.pos = 0
        return True

    def _named(self, header: str) -> tuple[str, str]:
        """Name and id of a call."""
        return header.strip(), ""


class DeepSeekMarks:
    """The words of DeepSeek's calls. Their bars and blanks are not those of a keyboard."""

    FRAME = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
    FRAME_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
    CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
    SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
    CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"


def deepseek() -> DelimitedCalls:
    """DeepSeek V3 (``function SEPARATOR name``, the arguments in a fence) and V3.1 (``name SEPARATOR {...}``)."""
    marks = DeepSeekMarks
    return DelimitedCalls((marks.FRAME, marks.FRAME_END), marks.CALL, marks.SEPARATOR, marks.CALL_END)


class KimiCalls(DelimitedCalls):
    """Kimi K2: the header is an id, ``functions.NAME:INDEX``."""

    def __init__(self) -> None:
        super().__init__(
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        )

    def _named(self, header: str) -> tuple[str, str]:
        call_id = header.strip()
        return call_id.removeprefix("functions.").partition(":")[0], call_id
