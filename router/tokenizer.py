"""A model folder as the router needs it: tokenizer, chat template, end tokens and generation defaults.

Workers speak token ids only. Tokenising and rendering run in a few threads, off the event loop; see `TextThreads`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pdcore.costs import AUTO
from pdcore.errors import InvalidRequest, ModelError
from router.chat_template import ChatTemplate, Conversation
from router.structured import StructureCheck
from router.template_source import given_template
from router.text import ByteDetokenizer, Detokenizer, StopWords, TextStream, TokenTexts, WindowDetokenizer
from router.text_threads import TextThreads
from router.tools.formats import ToolFormat, format_for

logger = logging.getLogger(__name__)

SLICE_CHARS = 64 << 10
"""Characters that a thread tokenises at once of a text that may be too long; about 0.1 s."""
UNLIMITED = 2**31 - 1
"""Tokens of an output where the context alone is the limit."""
CHARS_PER_TOKEN = 4
"""About; to tell how long decoding takes."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Settings of a generation_config.json that change what transformers would generate, and that nothing here does; with
# the values at which they do nothing there.
_NOT_HONOURED: dict[str, object] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_length": 20,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "typical_p": 1.0,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's publisher suggests; None where nothing is said."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others are moved past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return table


class Special(Enum):
    """Which special tokens have a text."""

    HIDDEN = "hidden"
    SHOWN = "shown"
    TOOLS = "tools"  # those only that tell of tool calls


class TextModel:
    """The text side of a served model. Immutable once loaded; thread-safe.

    Attributes:
        end_token_ids: tokens that end a sequence.
        defaults: generation defaults.
        max_token_chars: no token stands for more characters of text than this.
        structures: checks structured outputs.
        chat_template: None if there is none.
        tool_format: how the model calls tools; None if that is not known.
        tool_tokens: the words of that format that are tokens of their own, and their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        end_token_ids: tuple[int, ...],
        defaults: GenerationDefaults,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.end_token_ids = end_token_ids
        self.defaults = defaults
        self.max_token_chars = max((len(token) for token in tokenizer.get_vocab()), default=1)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.tool_format = tool_format
        markers = () if tool_format is None else tool_format.markers
        self.tool_tokens = {token.content: token_id for token_id, token in added.items() if token.content in markers}
        self._decoders = _decoder_types(tokenizer)
        self._byte_of = _byte_of_character()
        self._hidden = {
            Special.SHOWN: frozenset[int](),
            Special.HIDDEN: self._special,
            Special.TOOLS: self._special - set(self.tool_tokens.values()),
        }
        self._texts = {
            shown: TokenTexts(partial(self._token_bytes, hidden)) for shown, hidden in self._hidden.items()
        }
        self._anchor = next(iter(tokenizer.encode("a", add_special_tokens=False).ids), None)
        self._threads = TextThreads()
        # Requests that come together often have the same ones. The largest take a megabyte.
        self._stop_words = lru_cache(maxsize=32)(StopWords)
        self.structures = StructureCheck(tokenizer.to_str, next(iter(end_token_ids), None))

    @classmethod
    def load(
        cls,
        folder: Path,
        tool_call_parser: str = AUTO,
        *,
        chat_template: str = "",
        default_max_tokens: int | None = None,
    ) -> TextModel:
        """Read a Hugging Face folder. Blocking.

        Args:
            tool_call_parser, chat_template, default_max_tokens: see `RouterConfig`.

        Raises:
            ModelError: there is no usable tokenizer, or a file is malformed. ConfigError: `chat_template` is no good.
        """
        config = _read_json(folder / "config.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        tokenizer = _load_tokenizer(folder)
        special_tokens = _special_tokens(tokenizer_config, _read_json(folder / "special_tokens_map.json"))
        source: str | None
        template: ChatTemplate | None
        if chat_template:
            source, template = given_template(chat_template, special_tokens)
        else:
            source = _chat_template_source(folder, tokenizer_config)
            template = None if source is None else ChatTemplate(source, special_tokens)
        defaults = _defaults(generation)
        if default_max_tokens is not None:
            defaults = replace(defaults, max_tokens=default_max_tokens or UNLIMITED)
        return cls(
            tokenizer,
            template,
            _end_tokens(generation, config, tokenizer, special_tokens),
            defaults,
            format_for(tool_call_parser, source),
        )

    def close(self) -> None:
        """Stop the threads; what is queued there is dropped."""
        self._threads.close()
        self.structures.close()

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text; a model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def tokenize(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of a plain prompt, with the tokens that the model wants around it (BOS).

        Raises:
            InvalidRequest: it has clearly more than `max_tokens`, found without tokenising all of it. A result may
                still have more.
        """
        await self._refuse_too_long("prompt", text, max_tokens)
        return await self._threads.run(len(text), lambda: self._encode(text, add_special_tokens=True))

    async def tokenize_chat(self, conversation: Conversation, max_tokens: int) -> list[int]:
        """Token ids of the prompt that asks for the next assistant message.

        Raises:
            InvalidRequest: the template does not accept these messages; or as for `tokenize`.
        """
        template = self.chat_template
        assert template is not None, "validated before"
        text = await self._threads.run(conversation.chars, lambda: _whole(template.render(conversation)))
        await self._refuse_too_long("chat", text, max_tokens)
        return await self._threads.run(len(text), lambda: self._encode(text, add_special_tokens=False))

    async def _refuse_too_long(self, field: str, text: str, max_tokens: int) -> None:
        """Count the tokens of a long text slice by slice, and stop at too many.

        A text that passes is tokenised again as a whole, since a cut may change the tokens around it. Around one cut
        they are at most those that one token's characters make by themselves: that many are not counted. Every slice
        is a turn of its own in the threads, so that others get theirs in between.
        """
        if len(text) <= SLICE_CHARS:
            return
        count = start = 0
        while start < len(text):
            stop = _cut(text, start)
            piece = text[start:stop]
            encode = partial(self._encode, piece, add_special_tokens=False)
            ids = await self._threads.run(len(piece), encode)
            count += max(0, len(ids) - self.max_token_chars)
            if count > max_tokens:
                raise InvalidRequest(
                    field,
                    f"the first {stop} of its {len(text)} characters have more tokens than the context of "
                    f"{max_tokens} tokens holds",
                )
            start = stop

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode` this lets the event loop run meanwhile: it gives up the interpreter lock.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    async def tokenize_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each text by itself, with nothing around it."""
        encode = self._tokenizer.encode_batch_fast
        chars = sum(map(len, words))
        return await self._threads.run(
            chars, lambda: [text.ids for text in encode(list(words), add_special_tokens=False)]
        )

    @property
    def tools_readable(self) -> bool:
        """Whether calls could be told from what the model writes.

        Also if its template knows of no tools: that is what is wrong with them then, and a format would not help.
        """
        return self.tool_format is not None or self.chat_template is None or not self.chat_template.uses_tools

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of whole outputs, special tokens skipped. Every id must be below the model's vocabulary size."""
        return await self._threads.run(CHARS_PER_TOKEN * len(token_ids), lambda: self._decode(token_ids))

    def stream(
        self,
        stops: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        special: Special = Special.HIDDEN,
    ) -> TextStream:
        """A new incremental detokeniser; see `TextStream`."""
        words = self._stop_words(stops) if stops else None
        return TextStream(self.detokenizer(special), words, include_stop=include_stop, min_tokens=min_tokens)

    def detokenizer(self, special: Special = Special.HIDDEN) -> Detokenizer:
        if self._has_byte_tokens:
            return ByteDetokenizer(self._texts[special])
        hidden = self._hidden[special]
        return WindowDetokenizer(lambda token_ids: self._decode([i for i in token_ids if i not in hidden], False))

    @property
    def _has_byte_tokens(self) -> bool:
        return "ByteLevel" in self._decoders or ("ByteFallback" in self._decoders and self._anchor is not None)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token says in the middle of a text, special ones as written. Not always whole characters."""
        if self._has_byte_tokens:
            return self._texts[Special.SHOWN].bytes_of(token_id, False) or b""
        return self._decode([token_id], skip_special=False).encode()

    def shown(self, token_id: int, skip_special: bool) -> bool:
        """Whether a token has a text; see `stream`."""
        return not (skip_special and token_id in self._special)

    def _decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)

    def _token_bytes(self, hidden: frozenset[int], token_id: int, start: bool) -> bytes | None:
        """See `TokenTexts`."""
        special = token_id in self._special
        token = None if token_id in hidden else self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if "ByteLevel" in self._decoders:
            return self._byte_level_bytes(token)
        return token.encode() if special else self._piece_bytes(token, token_id, start)

    def _byte_level_bytes(self, token: str) -> bytes:
        if all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return token.encode()

    def _piece_bytes(self, token: str, token_id: int, start: bool) -> bytes:
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if start:
            return self._decode([token_id]).encode()
        # Behind another token, so that what the decoder does at the start of a text is not done.
        anchor = self._anchor
        assert anchor is not None
        return self._decode([anchor, token_id])[len(self._decode([anchor])) :].encode()


def _whole(text: str) -> str:
    """A chat's prompt, which may have what no UTF-8 has: JSON in it (of calls, of tools) can spell half a character.

    Raises InvalidRequest.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("chat", "must not have halves of characters") from None
    return text


def _cut(text: str, start: int) -> int:
    """Where the slice that begins at `start` ends: before white space in its last part if there is any."""
    stop = start + SLICE_CHARS
    if stop >= len(text):
        return len(text)
    space = max(text.rfind(" ", stop - 1024, stop), text.rfind("\n", stop - 1024, stop))
    return stop if space < 0 else space


def _decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    """Names of the steps by which a tokenizer turns tokens into text."""
    if tokenizer.decoder is None:
        return frozenset()
    state = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in state.get("decoders", [state]))


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return content


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if path.exists():
            return Tokenizer.from_file(str(path))
        # Older folders have only a slow tokenizer's files, which transformers can convert. Imported late: it
        # costs seconds and hundreds of megabytes.
        from transformers import AutoTokenizer

        converted: Tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
        return converted
    except Exception as error:  # both libraries raise bare Exception
        raise ModelError(f"no usable tokenizer in {folder}: {error}") from error


def _token_text(value: object) -> str | None:
    """Token entries are strings, or objects with the string as `content`."""
    if isinstance(value, AddedToken):
        return value.content
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    found: dict[str, str] = {}
    for source in sources:
        for name in names:
            text = _token_text(source.get(name))
            if text is not None:
                found.setdefault(name, text)
    return found


def _chat_template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _end_tokens(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(dict.fromkeys(int(token_id) for token_id in value))
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    def number(key: str, allowed: Callable[[float], bool]) -> float | None:
        value = generation.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
            logger.warning("generation_config.json: %s is %r, which is not usable; ignored", key, value)
            return None
        return float(value)

    def whole(key: str, least: int) -> int | None:
        value = number(key, lambda value: least <= value <= 2**31 - 1)
        return None if value is None else int(value)

    ignored = sorted(key for key, off in _NOT_HONOURED.items() if generation.get(key) not in (None, off))
    if ignored:
        logger.warning("generation_config.json: %s is not supported; ignored", ", ".join(ignored))
    # A publisher who says "do not sample" means greedy decoding, whatever temperature stands beside it.
    greedy = generation.get("do_sample") is False
    return GenerationDefaults(
        max_tokens=whole("max_new_tokens", 1),
        temperature=0.0 if greedy else number("temperature", lambda value: value >= 0),
        top_k=whole("top_k", 0),
        top_p=number("top_p", lambda value: 0 < value <= 1),
        min_p=number("min_p", lambda value: 0 <= value < 1),
        repetition_penalty=number(
            "repetition_penalty", lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY
        ),
    )
