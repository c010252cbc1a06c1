"""What docs/api.md says of a field of the HTTP interface."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest

from tests.support.processes import REPOSITORY


@pytest.fixture(scope="module")
def make_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", REPOSITORY / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COUNT = {"type": "integer", "minimum": 0, "maximum": 9000}
SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (COUNT, "(>= 0 and <= 9000)"),
        ({"anyOf": [COUNT, NULL]}, "(>= 0 and <= 9000)"),
        ({"anyOf": [COUNT, NULL], "minimum": 1, "maximum": 16}, "(>= 1 and <= 16)"),
        ({"anyOf": [COUNT, NULL], "minimum": -1, "maximum": 16}, "(>= 0 and <= 16)"),
        ({"anyOf": [SHARE, NULL]}, "(> 0 and <= 1)"),
        ({"anyOf": [COUNT, SHARE]}, "(>= 0 and <= 9000) (> 0 and <= 1)"),
        ({"anyOf": [{"type": "string"}, NULL]}, ""),
        (
            {"type": "integer", "maximum": 3, "description": "How many.", "default": 2},
            "How many. (<= 3) Default: `2`.",
        ),
    ],
)
def test_a_number_has_one_range(make_api: ModuleType, schema: dict[str, Any], words: str) -> None:
    assert make_api.field_words(schema) == words
