"""How much there is in a JSON text, found without reading it.

A reader makes an object of every name, list and value, with nothing else of the process running meanwhile: 16 MB of
empty lists keep a router's other clients waiting for seconds. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pdcore.errors import InvalidRequest

MAX_PARTS = 1 << 15
"""Names, lists and objects of a request, which cost microseconds each: a tenth of a second in all."""
MAX_VALUES = 1 << 19
"""Values in lists, which cost less, and in all the same: token ids come as such."""

# It always matches from a quotation mark on, and gives nothing back: the time it takes grows with the length alone.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_json_size(field: str, *texts: bytes) -> None:
    """Raises InvalidRequest for texts that have more together than is allowed."""
    if sum(map(len, texts)) <= MAX_PARTS:
        return
    parts, values = _counts(texts)
    if parts <= MAX_PARTS and values <= MAX_VALUES:
        return  # even if all of it were outside of strings
    quotes = sum(text.count(b'"') - text.count(b'\\"') for text in texts)
    if quotes <= 2 * MAX_VALUES:
        parts, values = _counts([_STRING.sub(b"", text) for text in texts])
    if parts > MAX_PARTS:
        raise InvalidRequest(field, f"must have at most {MAX_PARTS} names, lists and objects")
    if values > MAX_VALUES:
        raise InvalidRequest(field, f"must have at most {MAX_VALUES} values")


def _counts(texts: Sequence[bytes]) -> tuple[int, int]:
    parts = sum(text.count(b":") + text.count(b"[") + text.count(b"{") for text in texts)
    return parts, sum(text.count(b",") for text in texts)
