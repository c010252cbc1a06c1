"""Writes docs/api.md from what clients are really given: the .proto files, and the description of the HTTP interface.

    python docs/make_api.py            write it
    python docs/make_api.py --check    exit with status 1, and the difference, if it is not what it would write

`make api` and `make check` run it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from google.protobuf.descriptor_pb2 import (  # noqa: E402
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc  # noqa: E402

from router.openai.app import make_app  # noqa: E402
from router.openai.face import Face  # noqa: E402

PUBLIC = ("generation", "open_inference", "admin")
"""Whose services clients call."""

INTRODUCTION = """\
# The public interfaces

Made from the `.proto` files and the OpenAPI description by `make api`; `make check` fails if it is out of date. For
gRPC the `.proto` files count, with which the router also answers reflection. `GET /openapi.json` has the HTTP part.
"""

# Numbers of fields in descriptor.proto, of which the paths of comments are made.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _METHODS, _VALUES = 2, 3, 4, 2, 2
_SYNTAX = 12

Path_ = tuple[int, ...]


class Comments:
    """The comments of a file, by the path of what they are at: those before it, then those behind it."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._at: dict[Path_, str] = {}
        for place in file.source_code_info.location:
            words = [*place.leading_detached_comments, place.leading_comments, place.trailing_comments]
            text = " ".join(" ".join(part.split()) for part in words if part.strip())
            if text:
                self._at[tuple(place.path)] = text

    def at(self, *path: int) -> str:
        return self._at.get(path, "")


def compiled() -> dict[str, FileDescriptorProto]:
    """Every .proto file of ours, by its name without folder and ending, with comments."""
    files = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "protos").glob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        command = ["protoc", f"-I{REPOSITORY}", "--include_source_info", f"--descriptor_set_out={out.name}", *files]
        if protoc.main(command) != 0:
            raise SystemExit("protoc refuses the .proto files")
        every = FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return {Path(file.name).stem: file for file in every.file}


class Types:
    """Messages and enums by their full names, each with its place in its file."""

    def __init__(self, files: Mapping[str, FileDescriptorProto]) -> None:
        self.messages: dict[str, tuple[DescriptorProto, Comments, Path_]] = {}
        self.enums: dict[str, tuple[EnumDescriptorProto, Comments, Path_]] = {}
        for file in files.values():
            comments = Comments(file)
            for index, message in enumerate(file.message_type):
                self._add(f".{file.package}.{message.name}", message, comments, (_MESSAGES, index))
            for index, enum in enumerate(file.enum_type):
                self.enums[f".{file.package}.{enum.name}"] = enum, comments, (_ENUMS, index)

    def _add(self, name: str, message: DescriptorProto, comments: Comments, path: Path_) -> None:
        self.messages[name] = message, comments, path
        for index, nested in enumerate(message.nested_type):
            self._add(f"{name}.{nested.name}", nested, comments, (*path, _NESTED, index))
        for index, enum in enumerate(message.enum_type):
            self.enums[f"{name}.{enum.name}"] = enum, comments, (*path, _NESTED_ENUMS, index)

    def reached(self, roots: Sequence[str]) -> list[str]:
        """What is reached from these, each once, in the order in which a reader comes to it."""
        found: dict[str, None] = {}
        ahead = list(reversed(roots))
        while ahead:
            name = ahead.pop()
            if name in found or self._is_map(name):
                continue
            found[name] = None
            if name in self.messages:
                ahead.extend(reversed(list(self._uses(self.messages[name][0]))))
        return list(found)

    def _uses(self, message: DescriptorProto) -> Iterator[str]:
        for field in message.field:
            if field.type_name in self.messages and self._is_map(field.type_name):
                yield from self._uses(self.messages[field.type_name][0])
            elif field.type_name in self.messages or field.type_name in self.enums:
                yield field.type_name

    def _is_map(self, name: str) -> bool:
        return name in self.messages and self.messages[name][0].options.map_entry

    def shown(self, field: FieldDescriptorProto) -> str:
        """The type of a field, as .proto files write it."""
        if field.type_name in self.messages and self._is_map(field.type_name):
            key, value = self.messages[field.type_name][0].field
            return f"map of {self.shown(key)} to {self.shown(value)}"
        if field.type_name:
            name = short(field.type_name)
            known = field.type_name in self.messages or field.type_name in self.enums
            kind = f"[{name}](#{anchor(name)})" if known else name
        else:
            kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {kind}"
        return f"optional {kind}" if field.proto3_optional else kind


def short(full: str) -> str:
    """``Chat.Part`` of ``.pdserve.v1.Chat.Part``: packages are in lower case."""
    return ".".join(part for part in full.split(".") if part[:1].isupper())


def anchor(title: str) -> str:
    """How Markdown viewers link to a title."""
    return title.lower().replace(".", "").replace(" ", "-").replace("/", "").replace("`", "")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(cell, row))} |"
    yield ""


# -- gRPC --------------------------------------------------------------------------------------------------------


def grpc_part(files: Mapping[str, FileDescriptorProto]) -> Iterator[str]:
    types = Types(files)
    roots: list[str] = []
    for name in PUBLIC:
        if name in files:
            file = files[name]
            comments = Comments(file)
            for index, service in enumerate(file.service):
                yield f"## gRPC: `{file.package}.{service.name}`\n"
                words = [comments.at(_SYNTAX), comments.at(_SERVICES, index)]
                yield from (f"{part}\n" for part in words if part)
                rows = []
                for number, method in enumerate(service.method):
                    rows.append([*call_of(method), comments.at(_SERVICES, index, _METHODS, number)])
                    roots += [method.input_type, method.output_type]
                yield from table(["call", "takes", "answers", ""], rows)
    yield "## Messages\n"
    for name in types.reached(roots):
        if name in types.messages:
            yield from message_part(types, name)
        else:
            yield from enum_part(types, name)


def call_of(method: MethodDescriptorProto) -> list[str]:
    def link(full: str, stream: bool) -> str:
        name = short(full)
        return f"{'stream of ' if stream else ''}[{name}](#{anchor(name)})"

    takes = link(method.input_type, method.client_streaming)
    return [f"`{method.name}`", takes, link(method.output_type, method.server_streaming)]


def message_part(types: Types, name: str) -> Iterator[str]:
    message, comments, path = types.messages[name]
    yield f"### {short(name)}\n"
    if comments.at(*path):
        yield f"{comments.at(*path)}\n"
    rows = []
    for index, field in enumerate(message.field):
        words = comments.at(*path, _FIELDS, index)
        if field.HasField("oneof_index") and not field.proto3_optional:
            words = f"(one of `{message.oneof_decl[field.oneof_index].name}`) {words}".rstrip()
        rows.append([f"`{field.name}`", str(field.number), types.shown(field), words])
    if rows:
        yield from table(["field", "number", "type", ""], rows)
    else:
        yield "No fields.\n"


def enum_part(types: Types, name: str) -> Iterator[str]:
    enum, comments, path = types.enums[name]
    yield f"### {short(name)}\n"
    if comments.at(*path):
        yield f"{comments.at(*path)}\n"
    rows = [[f"`{v.name}`", str(v.number), comments.at(*path, _VALUES, i)] for i, v in enumerate(enum.value)]
    yield from table(["value", "number", ""], rows)


# -- HTTP --------------------------------------------------------------------------------------------------------


def http_part(description: Mapping[str, Any]) -> Iterator[str]:
    yield "## HTTP\n"
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            yield f"### `{method.upper()} {path}`\n"
            words = [operation.get("summary", ""), operation.get("description", "")]
            yield ". ".join(part.rstrip(".") for part in words if part) + ".\n"
            body = operation.get("requestBody", {}).get("content", {})
            for media, content in body.items():
                yield f"Takes {media}: {kind_of(content.get('schema', {}))}\n"
            rows = []
            for status, response in sorted(operation["responses"].items()):
                kinds = [
                    f"{media}: {kind_of(content.get('schema', {}))}"
                    for media, content in response.get("content", {}).items()
                ]
                rows.append([status, response.get("description", ""), "; ".join(kinds)])
            yield from table(["status", "", "body"], rows)
    yield "## HTTP: bodies\n"
    for name, schema in sorted(description.get("components", {}).get("schemas", {}).items()):
        yield f"### {name} (HTTP)\n"
        if schema.get("description"):
            yield " ".join(schema["description"].split()) + "\n"
        needed = set(schema.get("required", ()))
        rows = [
            [f"`{field}`{' (needed)' if field in needed else ''}", kind_of(of), " ".join(field_words(of).split())]
            for field, of in schema.get("properties", {}).items()
        ]
        if rows:
            yield from table(["field", "type", ""], rows)
        else:
            yield f"{kind_of(schema)}\n"


def field_words(schema: Mapping[str, Any]) -> str:
    parts = [schema.get("description", "")]
    forms = [form for form in schema.get("anyOf", ({},)) if form.get("type") != "null"]
    # What is said of the whole field counts for each of its forms.
    for said in dict.fromkeys(range_of(schema, form) for form in forms):
        if said:
            parts.append(f"({said})")
    if schema.get("default") is not None:
        parts.append(f"Default: `{json.dumps(schema['default'])}`.")
    return " ".join(part for part in parts if part)


def range_of(*schemas: Mapping[str, Any]) -> str:
    """What a number has to be that suits all of them, in words; empty if it may be any."""
    bounds = (
        ("minimum", ">=", max),
        ("exclusiveMinimum", ">", max),
        ("maximum", "<=", min),
        ("exclusiveMaximum", "<", min),
    )
    said = []
    for key, sign, tightest in bounds:
        if values := [schema[key] for schema in schemas if key in schema]:
            said.append(f"{sign} {tightest(values)}")
    return " and ".join(said)


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a schema describes, in words."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{anchor(f'{name} (HTTP)').replace('(', '').replace(')', '')})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = dict.fromkeys(kind_of(part) for part in schema[key])
            return " or ".join(kind for kind in kinds if kind != "null") or "null"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {kind_of(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {kind_of(schema['additionalProperties'])}"
        case str(name):
            return name
        case _:
            return "anything"


def text() -> str:
    """What docs/api.md has to be."""
    # Paths are described whether or not there is a router behind them.
    nothing: Any = None
    face = Face(nothing, nothing, nothing, served_name="", serving=lambda: False, max_body_bytes=0)
    parts = [INTRODUCTION, *grpc_part(compiled()), *http_part(make_app(face).openapi())]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/api.md is out of date")
    check = parser.parse_args().check
    target, wanted = REPOSITORY / "docs" / "api.md", text()
    if not check:
        target.write_text(wanted, encoding="utf-8")
        return 0
    there = target.read_text(encoding="utf-8") if target.exists() else ""
    difference = difflib.unified_diff(
        there.splitlines(), wanted.splitlines(), "docs/api.md", "what it should be", lineterm=""
    )
    lines = list(difference)
    print("\n".join(lines[:60]) if lines else "docs/api.md is up to date")
    if lines:
        print("docs/api.md is out of date: run make api", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
