"""Frozen configuration dataclasses to JSON and back, for handing a configuration to a new process."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pdcore.errors import ConfigError, UnknownKey

T = TypeVar("T")


def to_json(config: object) -> str:
    """JSON text of a dataclass instance, nested ones included."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return json.dumps(dataclasses.asdict(config), indent=2)


def load_json(cls: type[T], path: Path) -> T:
    """What is in a file. Raises ConfigError, which names it; and see `from_json`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(cls.__name__, str(path), f"a readable file of JSON ({why})") from None
    try:
        return from_json(cls, text)
    except ConfigError as error:
        raise error.found_in(str(path)) from None


def from_json(cls: type[T], text: str) -> T:
    """The inverse of `to_json`. Raises ConfigError for unknown keys and values of the wrong kind."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(cls.__name__, text[:80], f"a JSON object ({error})") from None
    value: T = _build(cls, data, cls.__name__)
    return value


def _build(kind: Any, value: Any, key: str) -> Any:
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, key)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(key, value, "a list")
        return tuple(_build(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is types.UnionType or origin is typing.Union:
        if value is None:
            return None
        return _build(next(arg for arg in get_args(kind) if arg is not type(None)), value, key)
    if origin is typing.Literal:
        if value not in get_args(kind):
            raise ConfigError(key, value, ", ".join(map(str, get_args(kind))))
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(key, value, ", ".join(str(member.value) for member in kind)) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(key, value, f"a value of type {kind.__name__}")
    return value


def _build_dataclass(cls: Any, value: Any, key: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(key, value, "an object")
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    for name in value:
        if name not in fields:
            near = [f"{key}.{close}" for close in difflib.get_close_matches(name, fields, n=1)]
            instead = f"; did you mean {near[0]}?" if near else "."
            known = f"{instead} Keys of {key} are {', '.join(sorted(fields))}"
            raise UnknownKey(f"{key}.{name}", value[name], known)
    for field in dataclasses.fields(cls):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in value:
            raise ConfigError(f"{key}.{field.name}", None, "a value, which it needs")
    return cls(**{name: _build(hints[name], item, f"{key}.{name}") for name, item in value.items()})
