"""Log-probabilities in the forms that OpenAI's clients know."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from pdcore.logprobs import Logprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; as at OpenAI."""


class TokenTexts(Protocol):
    """What tokens say by themselves; see `router.tokenizer.TextModel`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def shown(self, token_id: int, skip_special: bool) -> bool: ...


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
