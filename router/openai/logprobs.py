"""Log-probabilities in the forms that OpenAI's clients know."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from pdcore.logprobs import Logprobs
from router.text import Detokenizer
from router.tokenizer import Special

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; as at OpenAI."""


class TokenTexts(Protocol):
    """What tokens say by themselves; see `router.tokenizer.TextModel`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def shown(self, token_id: int, skip_special: bool) -> bool: ...


class OutputTexts(TokenTexts, Protocol):
    """And what they say one after the other."""

    def detokenizer(self, special: Special) -> Detokenizer: ...


def chat_content(logprobs: Logprobs, token_ids: Sequence[int], texts: TokenTexts) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of a chat: one entry for each token."""
    return [
        {
            **_entry(token_id, logprobs.values[index], texts),
            "top_logprobs": [_entry(*likely, texts) for likely in _likeliest(logprobs, index)],
        }
        for index, token_id in enumerate(token_ids)
    ]


def _entry(token_id: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    data = texts.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": finite(value), "bytes": list(data)}


def finite(value: float) -> float:
    """As JSON can say it."""
    return value if value > LOWEST else LOWEST  # NaN is not above it


def topped(logprobs: Logprobs, top: int) -> Logprobs:
    """The same, with at most `top` likeliest of each."""
    if logprobs.top <= top:
        return logprobs
    keep = [index * logprobs.top + rank for index in range(len(logprobs)) for rank in range(top)]
    ids, values = logprobs.top_ids, logprobs.top_values
    return Logprobs(logprobs.start, top, logprobs.values, tuple(ids[k] for k in keep), tuple(values[k] for k in keep))


def _likeliest(logprobs: Logprobs, index: int) -> list[tuple[int, float]]:
    flat = slice(index * logprobs.top, (index + 1) * logprobs.top)
    return list(zip(logprobs.top_ids[flat], logprobs.top_values[flat], strict=True))


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion, which go on from one chunk to the next.

    Args:
        offset: characters of the text before the first token.
    """

    def __init__(self, texts: TokenTexts, skip_special: bool, offset: int = 0) -> None:
        self._texts = texts
        self._skip_special = skip_special
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token_ids: Sequence[int], logprobs: Logprobs | None) -> dict[str, list[Any]]:
        """Of the next tokens. Without `logprobs` there are none for them, as for the first token of a prompt."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for index, token_id in enumerate(token_ids):
            tokens.append(self._name(token_id))
            offsets.append(self._offset)
            if self._texts.shown(token_id, self._skip_special):
                self._offset += len(self._decoder.decode(self._texts.token_bytes(token_id)))
            if logprobs is None:
                values.append(None)
                tops.append(None)
                continue
            value = finite(logprobs.values[index])
            top = {self._name(other): finite(likely) for other, likely in _likeliest(logprobs, index)}
            top.setdefault(tokens[-1], value)
            values.append(value)
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token_id: int) -> str:
        """What a token says; if that is no whole character its bytes, so that no two tokens have the same name."""
        data = self._texts.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class PlacedLogprobs:
    """The log-probabilities of an output's tokens by where their text stands in it: text comes later than its tokens
    while it may still be something else.

    ::

        text:    [taken, or given up ....|first waiting|next waiting|...]
                                         ^ _start      ^ its end

    Args:
        special: as the output's text was made.
    """

    def __init__(self, texts: OutputTexts, special: Special) -> None:
        self._texts = texts
        self._detokenizer = texts.detokenizer(special)
        self._start = self._end = 0
        self._waiting: deque[tuple[int, list[dict[str, Any]]]] = deque()
        self._unfinished: list[dict[str, Any]] = []  # no character is complete with them yet

    def add(self, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        """The next tokens."""
        for token_id, entry in zip(token_ids, chat_content(logprobs, token_ids, self._texts), strict=True):
            text = self._detokenizer.push(token_id)
            if text or self._texts.shown(token_id, skip_special=True):
                self._unfinished.append(entry)
            self._place(text)

    def finish(self) -> None:
        """No more tokens come."""
        self._place(self._detokenizer.flush())

    def _place(self, text: str) -> None:
        if text:
            self._end += len(text)
            self._waiting.append((self._end, self._unfinished))
            self._unfinished = []

    def take(self, start: int, end: int) -> list[dict[str, Any]]:
        """Of the tokens with text from `start` to `end`. Each comes once; those of earlier text are given up."""
        taken = []
        while self._waiting and self._start < end:
            self._start, entries = self._waiting.popleft()
            if self._start > start:
                taken += entries
        return taken


def joined_pieces(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """One of what `CompletionLogprobs.of` gave, piece after piece."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for piece in pieces for value in piece[name]] for name in names}


def prompt_entries(
    prompt: Sequence[int], logprobs: Logprobs | None, texts: TokenTexts
) -> list[dict[str, dict[str, Any]] | None]:
    """``prompt_logprobs`` as at vLLM: for each prompt token those of it and of the likeliest, by token id.

    `logprobs`: None of a prompt of one token, which has none.
    """
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for index, token_id in enumerate(prompt[1:]):
        assert logprobs is not None
        found: dict[str, dict[str, Any]] = {
            str(other): {"logprob": finite(value), "rank": rank, "decoded_token": _text(other, texts)}
            for rank, (other, value) in enumerate(_likeliest(logprobs, index), start=1)
        }
        own: dict[str, Any] = {
            "logprob": finite(logprobs.values[index]),
            "rank": None,
            "decoded_token": _text(token_id, texts),
        }
        found.setdefault(str(token_id), own)
        entries.append(found)
    return entries


def _text(token_id: int, texts: TokenTexts) -> str:
    return texts.token_bytes(token_id).decode(errors="replace")
