"""A model folder as the router needs it: tokenizer, chat template, end tokens and generation defaults.

Workers speak token ids only. Tokenising and rendering run in a small thread pool, off the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders

from pdcore.errors import ModelError
from router.chat_template import ChatTemplate
from router.text import ByteDetokenizer, Detokenizer, TextStream, WindowDetokenizer

THREADS = 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's publisher suggests; None where nothing is said."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others are moved past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return table


class TextModel:
    """The text side of a served model. Immutable once loaded; thread-safe.

    Attributes:
        end_token_ids: tokens that end a sequence.
        defaults: generation defaults.
        max_token_chars: no token stands for more characters of text than this.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        end_token_ids: tuple[int, ...],
        defaults: GenerationDefaults,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.end_token_ids = end_token_ids
        self.defaults = defaults
        self.max_token_chars = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._special = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._bytes: dict[int, bytes] = {}
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = _byte_of_character()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, folder: Path) -> TextModel:
        """Read a Hugging Face folder. Blocking.

        Raises:
            ModelError: there is no usable tokenizer, or a file is malformed.
        """
        config = _read_json(folder / "config.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        tokenizer = _load_tokenizer(folder)
        special_tokens = _special_tokens(tokenizer_config, _read_json(folder / "special_tokens_map.json"))
        source = _chat_template_source(folder, tokenizer_config)
        return cls(
            tokenizer,
            None if source is None else ChatTemplate(source, special_tokens),
            _end_tokens(generation, config, tokenizer, special_tokens),
            _defaults(generation),
        )

    def close(self) -> None:
        """Stop the thread pool; what is queued there is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text; a model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the tokens that the model wants around it (BOS)."""
        return await self._run(lambda: self._tokenizer.encode(text).ids)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the prompt that asks for the next assistant message.

        Raises:
            InvalidRequest: the template does not accept these messages.
        """
        template = self._chat_template
        assert template is not None, "validated before"
        return await self._run(lambda: self._tokenizer.encode(template.render(messages), add_special_tokens=False).ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of whole outputs, special tokens skipped. Every id must be below the model's vocabulary size."""
        return await self._run(lambda: self._decode(token_ids))

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        """A new incremental detokeniser."""
        return TextStream(self.detokenizer(), stops)

    def detokenizer(self) -> Detokenizer:
        if self._byte_level:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            text = b""
        elif all(character in self._byte_of for character in token):
            text = bytes(self._byte_of[character] for character in token)
        else:
            text = token.encode()
        self._bytes[token_id] = text
        return text

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


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

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:  # noqa: BLE001  # both libraries raise bare Exception
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
    def number(key: str) -> float | None:
        value = generation.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(key: str) -> int | None:
        value = number(key)
        return None if value is None else int(value)

    # A publisher who says "do not sample" means greedy decoding, whatever temperature stands beside it.
    greedy = generation.get("do_sample") is False
    return GenerationDefaults(
        max_tokens=whole("max_new_tokens"),
        temperature=0.0 if greedy else number("temperature"),
        top_k=whole("top_k"),
        top_p=number("top_p"),
        min_p=number("min_p"),
    )
