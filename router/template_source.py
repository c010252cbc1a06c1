"""A chat template that the configuration gives in place of the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdcore.errors import ConfigError, ModelError
from router.chat_template import ChatTemplate

KEY = "router.chat_template"
MAX_BYTES = 1 << 20
_SHOWN_CHARS = 80


def given_template(given: str, special_tokens: Mapping[str, str] | None = None) -> tuple[str, ChatTemplate]:
    """Source of a template, and the template. Blocking.

    Args:
        given: path of a Jinja file; or the template itself, which has a brace or a line break in it.
        special_tokens: see `ChatTemplate`.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """
    source = given if "{" in given or "\n" in given else _read(Path(given))
    try:
        return source, ChatTemplate(source, special_tokens or {})
    except ModelError as error:
        raise ConfigError(KEY, given[:_SHOWN_CHARS], f"a Jinja template that compiles ({error.__cause__})") from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) <= MAX_BYTES:
            return content.decode()
        problem = f"it has more than {MAX_BYTES} bytes"
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    raise ConfigError(KEY, str(path), f"a file with a Jinja template, or its text ({problem})")
