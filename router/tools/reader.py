"""Reading a text that arrives piece by piece, and is taken back where it turns out to be something else.

A parser is written as if the whole text were there: its steps are generators, which yield where they need more of it.
A step decides by the text alone, never by where a piece ended, so every cut gives the same result.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import TypeVar

from router.tools.events import CallArguments, CallBegin, Content, Event

T = TypeVar("T")
Step = Generator[None, None, T]
"""Yields where it needs more text; returns what it read."""

SPACE = " \t\r\n"
MAX_NAME_CHARS = 256
"""A name that is longer is none: text that only looks like a call is not held back for ever."""
_OPENING, _CLOSING = "{[", "}]"


class Reader:
    """The text, how far it is read, and the events that came of it.

    ::

        text:   [read ........|to be read ......]
                ^ back(0)     ^ pos             ^ more comes, until `closed`

    `commit` forgets what is read; up to there nothing can be taken back.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._events: list[Event] = []
        self._calls = 0
        self._after_call = False
        self._forgotten = 0

    # -- out -----------------------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def content(self, end: int) -> None:
        """Give out what is to be read up to `end`, and read it."""
        self._add_content(self.text[self.pos : end], self._forgotten + self.pos)
        self.pos = end

    def content_again(self, text: str) -> None:
        """Give out what was read last, and forgotten: it was no call."""
        self.pos = 0
        self._add_content(text, self._forgotten - len(text))

    def _add_content(self, text: str, start: int) -> None:
        """Text for the reader. White space between a call and what follows is none."""
        if self._after_call:
            start += len(text)
            text = text.lstrip(SPACE)
            start -= len(text)
        if not text:
            return
        self._after_call = False
        last = self._events[-1] if self._events else None
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + text, last.start)
        else:
            self._events.append(Content(text, start))

    def begin(self, name: str, call_id: str = "") -> None:
        self._events.append(CallBegin(self._calls, name, call_id))
        self._calls += 1
        self._after_call = True

    def arguments(self, text: str) -> None:
        """Of the call begun last."""
        if not text:
            return
        index = self._calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments) and last.index == index:
            self._events[-1] = CallArguments(index, last.text + text)
        else:
            self._events.append(CallArguments(index, text))

    # -- in ------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        self._forgotten += self.pos
        self.text = self.text[self.pos :]
        self.pos = 0

    def has(self, count: int) -> Step[bool]:
        """Whether there are so many more characters."""
        while len(self.text) - self.pos < count and not self.closed:
            yield
        return len(self.text) - self.pos >= count

    def at(self, *words: str) -> Step[str]:
        """The word that comes next, which is read, or an empty string. None of them begins with another."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    self.pos += len(word)
                    return word
            if self.closed or not any(word.startswith(rest) for word in words):
                return ""
            yield

    def peek(self) -> Step[str]:
        """The next character, which is not read; an empty string at the end."""
        there = yield from self.has(1)
        return self.text[self.pos] if there else ""

    def space(self) -> Step[None]:
        """Read white space."""
        while True:
            character = yield from self.peek()
            if not character or character not in SPACE:
                return
            self.pos += 1

    def before(self, word: str, limit: int = MAX_NAME_CHARS) -> Step[str | None]:
        """Read up to a word, and that too. None if it does not come within `limit` characters."""
        while True:
            end = self.text.find(word, self.pos)
            if 0 <= end <= self.pos + limit:
                found = self.text[self.pos : end]
                self.pos = end + len(word)
                return found
            if self.closed or end >= 0 or len(self.text) - self.pos >= limit + len(word):
                return None
            yield

    def content_before(self, words: Sequence[str]) -> Step[tuple[str, str] | None]:
        """Give out text as content up to one of these words, which is read, without the white space before it.

        Returns:
            The word and that white space; None at the end of the text.
        """
        while True:
            found = [(start, word) for word in words if (start := self.text.find(word, self.pos)) >= 0]
            if found:
                start, word = min(found)
                certain = self._trim(start)
                self.content(certain)
                space = self.text[certain:start]
                self.pos = start + len(word)
                self.commit()
                return word, space
            if self.closed:
                self.content(len(self.text))
                return None
            certain = self._trim(len(self.text) - self._beginning(words))
            self.content(certain)
            self.commit()
            yield

    def _trim(self, end: int) -> int:
        """Where the white space before `end` begins."""
        return self.pos + len(self.text[self.pos : end].rstrip(SPACE))

    def _beginning(self, words: Sequence[str]) -> int:
        """How many characters at the end of the text may be the beginning of a word."""
        tail = self.text[self.pos :][-max(map(len, words)) :]
        for start in range(len(tail)):
            if any(len(tail) - start < len(word) and word.startswith(tail[start:]) for word in words):
                return len(tail) - start
        return 0

    # -- JSON ----------------------------------------------------------------------------------------------------

    def json_string(self, limit: int | None = None) -> Step[str | None]:
        """Read a string; its value, or None if there is none, or it has more than `limit` characters."""
        if (yield from self.peek()) != '"':
            return None
        start, end = self.pos, self.pos + 1
        while True:
            while end >= len(self.text):
                if self.closed or (limit is not None and end - start > 12 * limit + 2):
                    return None
                yield
            character = self.text[end]
            end += 2 if character == "\\" else 1
            if character == '"':
                break
        try:
            value = json.loads(self.text[start:end], strict=False)
        except ValueError:
            return None
        self.pos = end
        return value if limit is None or len(value) <= limit else None

    def json_container(self, *, out: bool) -> Step[str | None]:
        """Read an object or an array, going by its brackets. None if it does not come to an end.

        Args:
            out: give it out as arguments as it comes. Nothing of it can be taken back then, and only a part of it
                is returned.
        """
        depth, quoted, start, end = 0, False, self.pos, self.pos
        while True:
            if end >= len(self.text):
                if out:
                    self.arguments(self.text[start:end])
                    self.pos = end
                    self.commit()
                    start = end = 0
                if self.closed:
                    return None
                yield
                continue
            character = self.text[end]
            if quoted:
                if character == "\\":
                    if end + 1 >= len(self.text) and not self.closed:
                        yield
                        continue
                    end += 1
                elif character == '"':
                    quoted = False
            elif character == '"':
                quoted = True
            elif character in _OPENING:
                depth += 1
            elif character in _CLOSING:
                depth -= 1
            end += 1
            if depth == 0:
                break
        value = self.text[start:end]
        self.pos = end
        if out:
            self.arguments(value)
            self.commit()
        return value

    def json_value(self) -> Step[str | None]:
        """Read any value; its JSON text, or None if there is none."""
        first = yield from self.peek()
        if first == '"':
            start = self.pos
            value = yield from self.json_string()
            return None if value is None else self.text[start : self.pos]
        if first and first in _OPENING:
            return (yield from self.json_container(out=False))
        start = self.pos
        while True:  # a number, true, false or null
            character = yield from self.peek()
            if not character or not (character.isalnum() or character in "+-."):
                break
            self.pos += 1
        word = self.text[start : self.pos]
        try:
            json.loads(word)
        except ValueError:
            return None
        return word


class ReaderParser:
    """A parser made of a step. See `ToolCallParser`."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._step = self._run()
        next(self._step, None)

    def feed(self, text: str) -> list[Event]:
        if text:
            self.reader.text += text
            next(self._step, None)
        return self.reader.take_events()

    def finish(self) -> list[Event]:
        self.reader.closed = True
        next(self._step, None)
        return self.reader.take_events()

    def _run(self) -> Step[None]:
        raise NotImplementedError
