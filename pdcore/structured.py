"""What a client may ask of the form of an output: a JSON schema, a regular expression, a choice, a grammar.

Only the request is described here, with the bounds that hold before anything is compiled; `pdcore.grammar` compiles.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from pdcore.errors import InvalidRequest

MAX_SOURCE_BYTES = 64 << 10
"""Size of all sources of one structured output together, in UTF-8."""
MAX_REGEX_BYTES = 8 << 10
MAX_GRAMMAR_BYTES = 32 << 10
MAX_CHOICES = 4096


class StructureKind(StrEnum):
    """By what an output is described; the names are those of the fields of ``StructuredOutput`` on the wire."""

    JSON_SCHEMA = "json_schema"  # one source: the schema, a JSON object
    JSON_OBJECT = "json_object"  # no source: any JSON object
    REGEX = "regex"  # one source: the pattern, which the whole output has to match
    CHOICE = "choice"  # the strings of which the output is one
    GRAMMAR = "grammar"  # one source: a grammar in EBNF, in the notation of Lark or of GBNF


_MAX_BYTES = {StructureKind.REGEX: MAX_REGEX_BYTES, StructureKind.GRAMMAR: MAX_GRAMMAR_BYTES}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have, as the client wrote it."""

    kind: StructureKind
    sources: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """Dotted path of the field as the client knows it, for errors."""
        return f"sampling.structured_output.{self.kind.value}"

    @property
    def digest(self) -> bytes:
        """Equal for equal descriptions; under it a compiled grammar is kept."""
        hashed = hashlib.sha256(self.kind.value.encode())
        for source in self.sources:
            data = source.encode()
            hashed.update(b"%d:" % len(data))
            hashed.update(data)
        return hashed.digest()

    def check_size(self) -> None:
        """Raises InvalidRequest for what is empty, or too large to be given to the compiler."""
        size = sum(len(source.encode()) for source in self.sources)
        limit = _MAX_BYTES.get(self.kind, MAX_SOURCE_BYTES)
        if size > limit:
            raise InvalidRequest(self.field, f"must have at most {limit} bytes, got {size}")
        if self.kind is StructureKind.CHOICE:
            self._check_choices()
        elif any(not source.strip() for source in self.sources):
            raise InvalidRequest(self.field, "must not be empty")

    def _check_choices(self) -> None:
        if not 1 <= len(self.sources) <= MAX_CHOICES:
            raise InvalidRequest(self.field, f"must be 1 to {MAX_CHOICES} strings, got {len(self.sources)}")
        for index, choice in enumerate(self.sources):
            if not choice:
                raise InvalidRequest(f"{self.field}[{index}]", "must not be empty")
