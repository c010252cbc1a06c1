"""Reading and writing the configuration: YAML and flags in, YAML out, errors in the user's terms."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ByteSize, ValidationError

from cluster.config import ClusterConfig
from cluster.config_objective import default_of
from cluster.config_sections import Section
from pdcore.errors import ConfigError, UnknownKey


def load_config(path: Path | None, overrides: Mapping[str, object] | None = None) -> ClusterConfig:
    """Read the cluster's configuration.

    Args:
        path: a YAML file, or None for the defaults alone.
        overrides: values that win over the file, by dotted key, e.g. ``{"router.grpc_port": 0}``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; names the key's path, the value, and what
            is allowed, and the file if it says so.
    """
    tree = _read_yaml(path) if path is not None else {}
    written = _keys_of(tree)
    for key, value in (overrides or {}).items():
        _set(tree, key, value)
        written -= {name for name in written if name == key or name.startswith(f"{key}.")}
    try:
        return _validated(tree, path)
    except ConfigError as error:
        if path is not None and error.key in written:
            raise error.found_in(str(path)) from error.__cause__
        raise


def _keys_of(tree: Mapping[str, object], prefix: str = "") -> set[str]:
    """The dotted keys of a file, those of sections included."""
    keys: set[str] = set()
    for name, value in tree.items():
        keys.add(prefix + name)
        if isinstance(value, dict):
            keys |= _keys_of(value, f"{prefix}{name}.")
    return keys


def _validated(tree: dict[str, object], path: Path | None) -> ClusterConfig:
    try:
        # By way of JSON, where pydantic's strict mode takes lists for tuples, but no "7" and no true for a number.
        config = ClusterConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise _config_error(error) from error
    except (ValueError, RecursionError) as error:  # a value that holds itself, or text that is no Unicode
        raise ConfigError("--config", str(path or "flags"), f"values that can be written down ({error})") from error
    config.check()
    return config


def to_yaml(config: ClusterConfig, *, explain: bool = False) -> str:
    """The configuration with every default filled in, as YAML that `load_config` reads back to the same.

    With `explain`, each key is preceded by a comment that says what it does, and values that come of the objective
    are comments themselves: so `objective` can be changed in the file, and a value that loses its ``#`` wins over it.
    Without, they are written as if they had been given.
    """
    lines: list[str] = []
    _write_section(config, lines, "", explain, config.objective)
    return "\n".join(lines) + "\n"


def _write_section(section: Section, lines: list[str], indent: str, explain: bool, objective: str) -> None:
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if key == "kv_memory" and getattr(section, "num_blocks", None) is not None:
            continue
        default = default_of(objective, section, key)
        derived = default is not None and key not in section.model_fields_set
        if explain and info.description:
            source = "" if default is None else f" ({_source(objective, default, derived=derived)})"
            lines.append(f"{indent}# {info.description}{source}")
        if isinstance(value, Section):
            lines.append(f"{indent}{key}:")
            _write_section(value, lines, indent + "  ", explain, objective)
            continue
        # No space behind this #, unlike those of comments: without it the line is in its place.
        lines.append(f"{indent}{'#' if explain and derived else ''}{key}: {_scalar(value)}")


def _source(objective: str, default: float, *, derived: bool) -> str:
    """Where the value of a key comes from that the objective has a default for."""
    if derived:
        return f"by objective {objective}; take the # away to set it yourself"
    return f"objective {objective} alone: {default:g}"


def _scalar(value: object) -> str:
    if isinstance(value, ByteSize):
        return _size(int(value))
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, dict):
        plain = {name: item.model_dump() if isinstance(item, Section) else item for name, item in plain.items()}
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _size(count: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return str(count)


YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""PyYAML lets through what Python says of impossible dates, endless numbers and bottomless nesting."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win in silence; here a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(str(key), key, f"a key that is a string (line {key_node.start_mark.line + 1})")
            if key in seen:
                raise ConfigError(key, "given twice", f"each key once (again in line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(path), f"a readable UTF-8 file ({error})") from error
    except ConfigError as error:
        raise error.found_in(str(path)) from error.__cause__
    except YAML_ERRORS as error:
        raise ConfigError("--config", str(path), f"valid YAML ({' '.join(str(error).split())[:300]})") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError("--config", str(path), "a file with a mapping of keys at its top")
    return _without_empty(tree, ClusterConfig)


def _without_empty(tree: dict[str, object], section: type[Section]) -> dict[str, object]:
    """Without the sections of which nothing is given, as where all keys of one are comments: YAML calls that null."""
    kept = {}
    for name, value in tree.items():
        child = None if _is_mapping(section, name) else _child(section, name)
        if child is not None and value is None:
            continue
        kept[name] = _without_empty(value, child) if child is not None and isinstance(value, dict) else value
    return kept


def _set(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(parent, child, f"a mapping of keys, since {dotted} is set")
        tree = child
    tree[last] = value


def _config_error(error: ValidationError) -> ConfigError:
    """Put the first of pydantic's findings into our words. Unknown keys go first: they explain missing ones."""
    findings = error.errors(include_url=False)
    finding = next((item for item in findings if item["type"] == "extra_forbidden"), findings[0])
    path = _key_path(finding["loc"])
    key = ".".join(path) or "(top)"
    others = dict.fromkeys(".".join(_key_path(item["loc"])) for item in findings)
    others.pop(key, None)
    also = f"; also wrong: {', '.join(others)}" if others else ""
    if finding["type"] == "extra_forbidden":
        return UnknownKey(key, finding["input"], _instead_of(path) + also)
    # A value of a union has one finding for each branch: what is allowed is any of them.
    same = [item for item in findings if _key_path(item["loc"]) == path]
    allowed = " or ".join(dict.fromkeys(_allowed(item) for item in same))
    expected = [item["ctx"]["expected"] for item in same if item["type"] == "literal_error"]
    names = [name.strip(" '") for text in expected for name in text.replace(" or ", ",").split(",")]
    return ConfigError(key, finding["input"], allowed + _suggest(finding["input"], names) + also)


_ALLOWED = {
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "tuple_type": "a list of core numbers",
    "byte_size": "a size such as 512MiB",
    "byte_size_unit": "a size such as 512MiB",
}


def _allowed(finding: Any) -> str:
    if finding["type"] in _ALLOWED:
        return _ALLOWED[finding["type"]]
    message: str = finding["msg"]
    for prefix in ("Input should be ", "Value error, ", "String should "):
        message = message.removeprefix(prefix)
    return message


def _key_path(loc: Sequence[int | str]) -> list[str]:
    """The keys of the file in a pydantic location, without the names of union branches."""
    path: list[str] = []
    section: type[Section] | None = ClusterConfig
    named = False  # the next part is a name that the user chose
    for part in loc:
        if section is None:
            break
        path.append(str(part))
        if not named:
            named = _is_mapping(section, str(part))
            section = _child(section, str(part))
        else:
            named = False
    return path


def _section_at(path: Sequence[str]) -> type[Section]:
    section: type[Section] = ClusterConfig
    for part in path:  # names in a mapping of sections are no keys of theirs
        section = _child(section, part) or section
    return section


def _is_mapping(section: type[Section], key: str) -> bool:
    """Whether the key holds sections by name."""
    info = section.model_fields.get(key)
    return info is not None and get_origin(info.annotation) is dict


def _child(section: type[Section], key: str) -> type[Section] | None:
    info = section.model_fields.get(key)
    kinds = [] if info is None else [info.annotation, *get_args(info.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _instead_of(path: Sequence[str]) -> str:
    """What there is instead of an unknown key: the nearest in its section, or elsewhere, and all of the section."""
    name, place = path[-1], ".".join(path[:-1])
    if "." in name:
        nested = "{".join(f"{part}: " for part in name.split(".")) + "..." + "}" * name.count(".")
        return f": sections are nested in a file, as in {nested}"
    known = list(_section_at(path[:-1]).model_fields)
    near = [".".join((*path[:-1], key)) for key in difflib.get_close_matches(name, known, n=1)]
    if not near:
        elsewhere = {key.rpartition(".")[2]: key for key in reversed(list(_all_keys(ClusterConfig)))}
        near = [elsewhere[key] for key in difflib.get_close_matches(name, list(elsewhere), n=1, cutoff=0.8)]
    question = f"; did you mean {near[0]}?" if near else "."
    return f"{question} Keys {f'of {place}' if place else 'at the top'} are {', '.join(known)}"


def _all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section and those in it; of sections by a user's names none."""
    for name in section.model_fields:
        yield prefix + name
        child = _child(section, name)
        if child is not None and not _is_mapping(section, name):
            yield from _all_keys(child, f"{prefix}{name}.")


def _suggest(value: object, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(value), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
