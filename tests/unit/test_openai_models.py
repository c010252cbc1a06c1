"""What must hold for every model of a request to OpenAI's interface, so that a new field cannot be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from pdcore.errors import InvalidRequest
from router.openai import app  # noqa: F401  # all the models there are
from router.openai.parsing import Message, parse
from router.openai.responses import ResponseRequest


def models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for kind in base.__subclasses__():
        yield kind
        yield from models(kind)


MODELS = sorted(set(models(Message)), key=lambda kind: kind.__qualname__)


def lists_of(schema: object) -> Iterator[Mapping[str, Any]]:
    """The lists in a core schema, however deep."""
    if isinstance(schema, Mapping):
        if schema.get("type") in ("list", "set", "frozenset", "tuple", "generator"):
            yield schema
        for value in schema.values():
            yield from lists_of(value)
    elif isinstance(schema, Sequence) and not isinstance(schema, str):
        for value in schema:
            yield from lists_of(value)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__qualname__)
def test_a_list_is_bounded_or_fails_at_its_first_fault(kind: type[BaseModel]) -> None:
    """Or pydantic makes an error for each of a million wrong members, and nothing else runs in these seconds."""
    for schema in lists_of(kind.__pydantic_core_schema__):
        assert schema.get("fail_fast") or schema.get("max_length", 10**9) <= 1000, schema


def test_a_list_with_many_faults_has_one() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ResponseRequest, b'{"input":"x","include":[' + b'"x",' * 1000 + b'"x"]}')
    assert [field for field, _ in caught.value.violations] == ["include[0]"]
