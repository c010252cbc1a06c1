"""The published tables are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.negotiation import GRPC
from kv_transfer.transport_matrix import PLACEMENTS, codec_table, placement_table, with_tables
from pdcore.config import CODECS, TRANSPORTS

PAGE = Path(__file__).parents[2] / "docs" / "kv-transports.md"


def test_the_page_says_what_the_code_does() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run python -m kv_transfer.transport_matrix docs/kv-transports.md"


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_stream_is_always_there_and_last() -> None:
    for row in rows(placement_table()):
        cells = dict(zip(TRANSPORTS, row[1:], strict=True))
        numbers = [cell for cell in cells.values() if cell.isdigit()]
        assert cells[GRPC] == str(len(numbers))
    assert len(rows(placement_table())) == len(PLACEMENTS)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_in_the_table(codec: str) -> None:
    (row,) = (row for row in rows(codec_table()) if row[0] == f"`{codec}`")
    assert all(GRPC in cell for cell in row[3:])
