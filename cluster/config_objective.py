"""What `objective` makes of a configuration: it fills in what is not given, and knows afterwards what that was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config_sections import Section
from pdcore.objective import ROUTER_DEFAULTS, SCHEDULER_DEFAULTS

_POOLS = ("prefill", "decode", "aggregated")

Filled = Mapping[tuple[str, ...], frozenset[str]]
"""The keys that were filled in, by the path of their section."""


def fill_in(kind: type[Section], data: Any) -> tuple[Any, Filled]:
    """Put the objective's defaults where nothing is given.

    Args:
        kind: of the whole configuration. data: what was given for it, of any type.
    """
    objective = data.get("objective", "balanced") if isinstance(data, dict) else None
    if not isinstance(objective, str) or objective not in SCHEDULER_DEFAULTS:
        return data, {}  # the fields' own checks say what is wrong
    filled: dict[tuple[str, ...], frozenset[str]] = {}
    data = _tuples(data)
    for name in _POOLS:
        pool = _as_mapping(data.get(name, {}))
        scheduler = None if pool is None else _as_mapping(pool.get("scheduler", {}))
        if pool is None or scheduler is None:
            continue
        known = _section(_section(kind, name), "scheduler").model_fields
        defaults = {key: value for key, value in SCHEDULER_DEFAULTS[objective].items() if key in known}
        filled[name, "scheduler"] = frozenset(defaults.keys() - scheduler.keys())
        data[name] = {**pool, "scheduler": {**defaults, **scheduler}}
    router = _as_mapping(data.get("router", {}))
    if router is not None:
        filled["router",] = frozenset(ROUTER_DEFAULTS[objective].keys() - router.keys())
        data["router"] = {**ROUTER_DEFAULTS[objective], **router}
    return data, filled


def forget_given(config: Section, filled: Filled) -> None:
    """Let the keys that were filled in not count as given: they are not in `model_fields_set` any more."""
    for path, keys in filled.items():
        section = config
        for name in path:
            section = getattr(section, name)
        section.model_fields_set.difference_update(keys)


def default_of(objective: str, section: Section, key: str) -> int | float | None:
    """What the objective alone makes of a key of a section; None if it is no key of its."""
    defaults = {**SCHEDULER_DEFAULTS[objective], **ROUTER_DEFAULTS[objective]}
    return defaults.get(key) if key in type(section).model_fields else None


def _section(parent: type[Section], key: str) -> type[Section]:
    """The type of one of the sections in `parent`."""
    kind = parent.model_fields[key].annotation
    assert isinstance(kind, type), key
    assert issubclass(kind, Section), key
    return kind


def _tuples(value: Any) -> Any:
    """Lists as tuples, throughout: what was JSON is checked as Python's values from here on."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    """What is given in a section, be it read or made in code; None if it is neither."""
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    return value if isinstance(value, dict) else None
