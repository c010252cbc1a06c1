"""How much there is in a JSON text, found without reading it."""

from __future__ import annotations

import json

import pytest

from pdcore.errors import InvalidRequest
from router.json_size import MAX_PARTS, MAX_VALUES, check_json_size


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": '[{:,"\\' * MAX_VALUES},  # a prompt may say what it likes
        {"prompt": '\\"' * 200_000 + ":[{" * MAX_PARTS},
        {"prompt": [1] * MAX_VALUES},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[[" * 100}]}] * (MAX_PARTS // 7 - 1)},
        [[]] * (MAX_PARTS - 1),
    ],
)
def test_what_fits(value: object) -> None:
    check_json_size("body", json.dumps(value).encode())
    check_json_size("body", json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" + b"[]," * MAX_PARTS + b"1]", "names, lists and objects"),
        (b'{"a":1,' * (MAX_PARTS // 2 + 1), "names, lists and objects"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", f"{MAX_VALUES} values"),
        (b'["\\"' + b'",",' * (2 * MAX_VALUES) + b'"]', f"{MAX_VALUES} values"),
        (b'"' + b'\\"' * MAX_VALUES + b"\\", ""),  # a string without an end is for the reader
        (b'{"a":"' + b"[" * (1 << 20) + b'\\\\",' + b"[[" * MAX_PARTS, "names, lists and objects"),
    ],
)
def test_what_is_too_much(text: bytes, words: str) -> None:
    if not words:
        check_json_size("body", text)
        return
    with pytest.raises(InvalidRequest, match=f"body: must have at most .*{words}"):
        check_json_size("body", text)


def test_several_texts_count_together() -> None:
    half = b"[" + b"[]," * (MAX_PARTS // 2) + b"1]"
    check_json_size("chat", half)
    with pytest.raises(InvalidRequest, match="chat: "):
        check_json_size("chat", half, half)
