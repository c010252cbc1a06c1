"""The texts that codecs are calibrated on and measured with, cut into windows of tokens. The two never overlap."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import Protocol

from pdcore.errors import ModelError

_SOURCES = ("argparse", "heapq", "textwrap", "statistics", "http.client", "sched")


class Tokenizer(Protocol):
    """What is needed of one."""

    def __call__(self, text: str) -> dict[str, list[int]]: ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises `ModelError`."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # It raises whatever its parsing runs into.
    except Exception as error:
        raise ModelError(f"{folder}: its tokenizer cannot be read: {error}") from error
    return tokenizer


def evaluation_texts() -> dict[str, str]:
    """Texts by name: stories, letters, essays, documents and code, kept with this package for measurements only."""
    folder = resources.files("cluster.codec_quality") / "texts"
    files = sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: file.name)
    return {file.name: file.read_text(encoding="utf-8") for file in files if not file.name.startswith("__")}


def calibration_texts() -> dict[str, str]:
    """What every Python installation has: the language reference as `help` shows it, and some modules' source."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    texts = {name: text for name, text in sorted(topics.items()) if len(text) >= 2000}
    return {name: inspect.getsource(import_module(name)) for name in _SOURCES} | texts


def cut_windows(texts: Sequence[str], tokenizer: Tokenizer, size: int, count: int) -> list[list[int]]:
    """Windows of exactly `size` tokens, none of which share text; at most `count`, from all texts in turn.

    Each begins with whatever tokens the tokenizer puts before a text.
    """
    start = tokenizer("")["input_ids"]
    body = size - len(start)
    cut = []
    for text in texts:
        tokens = tokenizer(text)["input_ids"][len(start) :]
        cut.append([start + tokens[at : at + body] for at in range(0, len(tokens) - body + 1, body)])
    longest = max((len(windows) for windows in cut), default=0)
    in_turn = [windows[turn] for turn in range(longest) for windows in cut if turn < len(windows)]
    return in_turn[:count]
