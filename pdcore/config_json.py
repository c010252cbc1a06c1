"""Frozen configuration dataclasses to JSON and back, for handing a configuration to a new process."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin

from pdcore.errors import ConfigError

T = TypeVar("T")


def to_json(config: object) -> str:
    """JSON text of a dataclass instance, nested ones included."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(cls: type[T], text: str) -> T:
    """The inverse of `to_json`. Raises ConfigError for unknown keys and values of the wrong kind."""
    try:
        data = json.loads(text)
    except ValueError as error:
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
            raise ConfigError(f"{key}.{name}", value[name], f"one of the keys {', '.join(sorted(fields))}")
    return cls(**{name: _build(hints[name], item, f"{key}.{name}") for name, item in value.items()})
