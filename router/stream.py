"""The output of one request on its way from the tracker to the client's call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pdcore.logprobs import Logprobs, joined
from router.effects import Outcome
from router.text import TextStream
from router.tracker import Timeline

PROMPT_TOKENS_AT_ONCE = 4096
"""Prompt tokens whose log-probabilities are in one chunk: with 20 likeliest each that is about 0.6 MB."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of a request: outcome, token counts and where the time went."""

    outcome: Outcome
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class Chunk:
    """All that became known since the last chunk.

    Attributes:
        index: position of the first of `token_ids` in the output.
        text: text that became certain. end: set in the last chunk.
        logprobs: of `token_ids`. prompt_logprobs: of prompt tokens. None where there are none, or not asked for.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    end: Terminal | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class RequestStream:
    """A mailbox with one reader. The tracker pushes tokens; the reader takes all that is there at once.

    So a client that reads fast gets each token at once, and one that reads slowly gets several in one message. The
    token window bounds what can pile up.

    `terminal`: the end; None while there is none.
    """

    def __init__(self, text: TextStream) -> None:
        self._text_stream = text
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._taken = 0
        self.terminal: Terminal | None = None
        self._news = False
        self._reader: asyncio.Future[None] | None = None

    def push(self, token_id: int, hidden: bool, logprobs: Logprobs | None) -> bool:
        """See `router.tracker.TokenSink`."""
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        text = self._text_stream.push(token_id, hidden)
        if text:
            self._text.append(text)
        self._tell()
        return self._text_stream.stopped

    def push_prompt(self, logprobs: Logprobs) -> None:
        """See `router.tracker.TokenSink`."""
        self._prompt_logprobs.append(logprobs)
        self._tell()

    def end(self, terminal: Terminal) -> None:
        """No more tokens come."""
        assert self.terminal is None, "a request ends once"
        self.terminal = terminal
        self._tell()  # before the text, so that the reader is told whatever becomes of that
        self._text.append(self._text_stream.finish())

    async def ready(self) -> None:
        """Wait for news. Not to be called after the chunk with the end."""
        # By hand, since this is done for every message: an asyncio.Event has many waiters, and costs twice as much.
        if not self._news:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> Chunk:
        """All the news there are, or of a long prompt the next part."""
        prompt_logprobs: Logprobs | None = None
        if self._prompt_logprobs:
            prompt_logprobs, more = self._take_prompt()
            if more:  # before any token
                return Chunk(self._taken, (), "", None, None, prompt_logprobs)
        self._news = False
        token_ids, self._token_ids = self._token_ids, []
        text, self._text = "".join(self._text), []
        logprobs: Logprobs | None = None
        if self._logprobs:
            logprobs, self._logprobs = joined(self._logprobs), []
        index = self._taken
        self._taken += len(token_ids)
        return Chunk(index, token_ids, text, self.terminal, logprobs, prompt_logprobs)

    def _tell(self) -> None:
        self._news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _take_prompt(self) -> tuple[Logprobs, bool]:
        """Log-probabilities of prompt tokens for the next chunk, and whether there are more."""
        every = joined(self._prompt_logprobs)
        cut = every.start + PROMPT_TOKENS_AT_ONCE
        if cut >= every.end:
            self._prompt_logprobs = []
            return every, False
        self._prompt_logprobs = [every.between(cut, every.end)]
        return every.between(every.start, cut), True
