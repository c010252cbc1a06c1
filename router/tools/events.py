"""What a model's output says, where it may call tools: text, and calls piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader. `start`: where in the output's text its first character stands; all of it is one piece
    of that."""

    text: str
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call whose name is known. `index`: from 0. `call_id`: what the model itself calls it, if anything."""

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are a JSON object. Pieces of one call follow its beginning."""

    index: int
    text: str


Event = Content | CallBegin | CallArguments


class ToolCallParser(Protocol):
    """Takes an output's text piece by piece. However it is cut, the events say the same when put together.

    Nothing raises: what is no call that can be read comes out as content, as the model wrote it. A call whose
    arguments have begun stays a call, with the arguments as far as they come; they may then be no valid JSON.
    """

    def feed(self, text: str) -> list[Event]:
        """What became certain with the next piece."""
        ...

    def finish(self) -> list[Event]:
        """What is left, at the end of the output."""
        ...


class PlainText:
    """The parser where there are no calls: everything is content."""

    def __init__(self) -> None:
        self._fed = 0

    def feed(self, text: str) -> list[Event]:
        start, self._fed = self._fed, self._fed + len(text)
        return [Content(text, start)] if text else []

    def finish(self) -> list[Event]:
        return []


class OnlyFirstCall:
    """Leaves out what comes behind the first call, for those who want one at a time."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._called = False

    def feed(self, text: str) -> list[Event]:
        return self._first(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._first(self._parser.finish())

    def _first(self, events: Sequence[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                if not self._called:
                    kept.append(event)
            elif event.index == 0:
                self._called = True
                kept.append(event)
        return kept


@dataclass(slots=True)
class Call:
    """A call as a whole. `arguments`: JSON text of an object, unless the model wrote something else."""

    name: str
    arguments: str = ""
    call_id: str = ""


@dataclass(slots=True)
class Answer:
    """An output as a whole."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case CallBegin(_, name, call_id):
                    self.calls.append(Call(name, call_id=call_id))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
