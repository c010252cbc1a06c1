"""The output of one request on its way from the tracker to the client's call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.text import TextStream
from router.tracker import Outcome, Timeline


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of a request: outcome, token counts and where the time went."""

    outcome: Outcome
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Chunk:
    """All that became known since the last chunk.

    Attributes:
        index: position of the first of `token_ids` in the output.
        text: text that became certain. end: set in the last chunk.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    end: Terminal | None


class RequestStream:
    """A mailbox with one reader. The tracker pushes tokens; the reader takes all that is there at once.

    So a client that reads fast gets each token at once, and one that reads slowly gets several in one message. The
    token window bounds what can pile up.
    """

    def __init__(self, text: TextStream) -> None:
        self._text_stream = text
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._taken = 0
        self._end: Terminal | None = None
        self._changed = asyncio.Event()

    def push(self, token_id: int, hidden: bool) -> bool:
        """See `router.tracker.TokenSink`."""
        self._token_ids.append(token_id)
        if not hidden:
            text = self._text_stream.push(token_id)
            if text:
                self._text.append(text)
        self._changed.set()
        return self._text_stream.stopped

    def end(self, terminal: Terminal) -> None:
        """No more tokens come."""
        assert self._end is None, "a request ends once"
        self._end = terminal
        self._changed.set()  # before the text, so that the reader is told whatever becomes of that
        self._text.append(self._text_stream.finish())

    async def take(self) -> Chunk:
        """Wait for news, then take all of it. Not to be called after the chunk with the end."""
        await self._changed.wait()
        self._changed.clear()
        index = self._taken
        token_ids, self._token_ids = tuple(self._token_ids), []
        text, self._text = "".join(self._text), []
        self._taken += len(token_ids)
        return Chunk(index, token_ids, text, self._end)
