"""Keys come and go without a restart; a file that is not right changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from pdcore.api_key import key_metadata
from pdcore.errors import ConfigError, Unauthenticated
from router.api_keys import Door
from router.key_file import KeyFile
from tests.unit.test_router_api_keys import digest_of


def write(path: Path, text: str) -> None:
    """As a careful operator does it: there is never half a file."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


async def settled(condition) -> None:  # type: ignore[no-untyped-def]
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")


def tenant(door: Door, key: str) -> str | None:
    try:
        return door.caller(key_metadata(key))
    except Unauthenticated:
        return None


async def test_changes_are_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"{digest_of('old')}: acme\n")
    file = KeyFile(path)
    door = Door(file.keys)
    watching = asyncio.create_task(file.watch(door, every_s=0.01))
    try:
        assert tenant(door, "old") == "acme"
        write(path, f"{digest_of('new')}: acme\n")
        await settled(lambda: tenant(door, "new") == "acme")
        assert tenant(door, "old") is None

        with caplog.at_level(logging.ERROR):
            write(path, "new: acme\n")  # the key where its digest should be
            await settled(lambda: caplog.records)
            await asyncio.sleep(0.05)
            assert len(caplog.records) == 1
            assert "64 hexadecimal digits" in caplog.text
            path.unlink()
            await settled(lambda: len(caplog.records) == 2)
        assert tenant(door, "new") == "acme"

        write(path, f"{digest_of('third')}: other\n")
        await settled(lambda: tenant(door, "third") == "other")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_the_first_version_must_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyFile(tmp_path / "none")
