"""From tokens to text, one at a time: incremental detokenisation and stop strings.

Everything here takes constant time per token (amortised), never shows half a UTF-8 character and never takes text
back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns a sequence of tokens into text piece by piece."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end: bytes of an unfinished character, as U+FFFD."""
        ...


class TokenTexts:
    """What the tokens of a tokenizer say, one by one, looked up once. For tokenizers whose tokens are byte strings.

    `whole`: text of the tokens seen so far that are whole characters, wherever they stand but at the beginning. What
    comes before such a token does not matter unless that is an unfinished character.

    Args:
        token_bytes: bytes of a token, None for special and unknown ones; the second argument says whether it stands
            at the beginning of the text, where some tokenizers drop a space.
    """

    def __init__(self, token_bytes: Callable[[int, bool], bytes | None]) -> None:
        self.whole: dict[int, str] = {}
        self._token_bytes = token_bytes
        self._bytes: dict[tuple[int, bool], bytes | None] = {}

    def bytes_of(self, token_id: int, at_start: bool) -> bytes | None:
        """See `token_bytes`."""
        key = (token_id, at_start)
        if key not in self._bytes:
            data = self._bytes[key] = self._token_bytes(token_id, at_start)
            if data is not None and not at_start:
                try:
                    self.whole[token_id] = data.decode()
                except UnicodeDecodeError:
                    pass
        return self._bytes[key]


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: byte-level BPE, and pieces with single bytes as a fallback."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._whole = texts.whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._between_characters = False  # and not at the start

    def push(self, token_id: int) -> str:
        if self._between_characters:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        data = self._texts.bytes_of(token_id, self._at_start)
        if data is None:
            return ""
        self._at_start = False
        text = self._decoder.decode(data)
        self._between_characters = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window of tokens again and shows what is new.

    ::

        window:   [context tokens | newer tokens ...............]
        decoded:  [shown ......................|new|held back U+FFFD...]

    The text of a token can depend on those before it (a leading space), hence the context. A trailing U+FFFD may be a
    character whose bytes are not all there, so it is held back; a character has at most four bytes, so more than
    `MAX_HELD` of them are invalid bytes and are shown.

    Args:
        decode: text of a list of token ids, special ones skipped.
    """

    CONTEXT = 6
    MAX_WINDOW = 24
    MAX_HELD = 4

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        held = len(text) - certain
        if held > self.MAX_HELD:
            certain += held - self.MAX_HELD
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) > self.MAX_WINDOW and self._shown == len(text):
            self._shrink()
        elif len(self._window) > 2 * self.MAX_WINDOW:
            # Nothing but invalid bytes for a whole window: they will not become characters any more.
            new += text[self._shown :]
            self._shrink()
        return new

    def flush(self) -> str:
        text = self._decode(self._window)
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _shrink(self) -> None:
        del self._window[: -self.CONTEXT]
        self._shown = len(self._decode(self._window))


@dataclass(frozen=True, slots=True)
class StopScan:
    """`text` may be shown. `matched`: a stop string is complete, and `text` is all up to it."""

    text: str
    matched: bool


class StopWords:
    """Stop strings as an automaton (Aho, Corasick 1975), which any number of texts may be read with at once.

    Attributes:
        edges: of each node, by character; node 0 is the beginning. depth: characters from there. match: length of the
            longest stop string that ends at the node; 0 if none does. fail: its longest proper suffix that is a node.
        begins: characters with which stop strings begin.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        self.fail = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self.begins = frozenset(self.edges[0])

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self.edges[node].get(character)
            if child is None:
                child = len(self.edges)
                self.edges[node][character] = child
                self.edges.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append(0)
                self.fail.append(0)
            node = child
        self.match[node] = len(stop)

    def _link(self) -> None:
        """Failure links, breadth first."""
        frontier = list(self.edges[0].values())
        for node in frontier:
            for character, child in self.edges[node].items():
                frontier.append(child)
                fail = self.fail[node]
                while fail and character not in self.edges[fail]:
                    fail = self.fail[fail]
                self.fail[child] = self.edges[fail].get(character, 0)
                self.match[child] = self.match[child] or self.match[self.fail[child]]


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, with one dictionary look-up per character.

    The first stop string to be complete ends the text; of several that end at the same character the longest, which
    begins first. So the result does not depend on how the text is cut into pieces. Text that may be the beginning of
    a stop string is held back until that is decided.

    `inclusive`: the text ends behind the stop string. Nothing need be held back then.
    """

    def __init__(self, words: StopWords, inclusive: bool = False) -> None:
        self._words = words
        self._inclusive = inclusive
        self._node = 0
        self._held = ""

    def passes(self, piece: str) -> bool:
        """Whether the next piece can be shown as it is: nothing is held back, and no stop string begins in it."""
        return not self._node and self._words.begins.isdisjoint(piece)

    def feed(self, piece: str) -> StopScan:
        """Take the next piece. Do not call again after a match."""
        words, text, node = self._words, self._held + piece, self._node
        for position, character in enumerate(piece, start=len(self._held) + 1):
            while node and character not in words.edges[node]:
                node = words.fail[node]
            node = words.edges[node].get(character, 0)
            if words.match[node]:
                self._held = ""
                end = position if self._inclusive else position - words.match[node]
                return StopScan(text[:end], matched=True)
        self._node = node
        certain = len(text) if self._inclusive else len(text) - words.depth[node]
        self._held = text[certain:]
        return StopScan(text[:certain], matched=False)

    def flush(self) -> str:
        """What is held back, at the end of the text: no stop string will be complete any more."""
        held, self._held, self._node = self._held, "", 0
        return held


class TextStream:
    """Text of one request's output: tokens in, text out, cut at the first stop string.

    Args:
        stops: None if there are none.
        include_stop: the text ends behind the stop string or token, not before it.
        min_tokens: text of this many tokens from the front is no part of a stop string.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: StopWords | None, *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = None if stops is None else StopMatcher(stops, include_stop)
        self._include_stop = include_stop
        self._exempt = min_tokens
        self.stopped = False

    def push(self, token_id: int, hidden: bool = False) -> str:
        """The text that became certain with this token. Sets `stopped` if a stop string is complete with it.

        `hidden`: it is a stop token, with which the sequence has ended.
        """
        if hidden:
            return self._detokenizer.push(token_id) if self._include_stop else ""
        piece = self._detokenizer.push(token_id)
        if self._exempt > 0:
            self._exempt -= 1
            return piece
        return self._scan(piece)

    def finish(self) -> str:
        """The rest of the text, once there are no more tokens. Empty after a stop string."""
        if self.stopped:
            return ""
        text = self._scan(self._detokenizer.flush())
        if self._matcher is not None and not self.stopped:
            text += self._matcher.flush()
        return text

    def _scan(self, piece: str) -> str:
        if self._matcher is None or self._matcher.passes(piece):
            return piece
        scan = self._matcher.feed(piece)
        self.stopped = scan.matched
        return scan.text
