"""Folders of Rays: removed once their owners are dead, and never while one lives or it cannot be told."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.ray_folder import RayFolder, remove_abandoned
from tests.support.processes import REPOSITORY

OWNER = """
import sys
from cluster.ray_folder import RayFolder
folder = RayFolder()
(folder.path / "session" / "logs").mkdir(parents=True)
(folder.path / "session" / "logs" / "raylet.out").write_text("words")
(folder.path / "session_latest").symlink_to(folder.path / "session")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_once_its_owner_has_been_killed(temporary: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner:
        try:
            folder = Path(owner.stdout.readline().strip())
            assert folder.parent == temporary
            remove_abandoned()
            assert (folder / "session" / "logs" / "raylet.out").exists()
        finally:
            owner.kill()
    assert folder.exists()
    remove_abandoned()
    assert list(temporary.iterdir()) == []


def test_what_cannot_be_told_is_left(temporary: Path) -> None:
    mine, kept = RayFolder(), RayFolder()
    (kept.path / "raylet.out").write_text("why it did not come up")
    assert kept.keep()
    (temporary / "pdserve-ray-without").mkdir()
    (temporary / "pdserve-ray-file").write_text("")
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").write_text("")
    (temporary / "pdserve-ray-link").symlink_to(elsewhere)
    (temporary / "another-ray-folder").mkdir()
    (temporary / "another-ray-folder" / "owner.lock").write_text("")
    pointing = temporary / "pdserve-ray-pointing"
    pointing.mkdir()
    (pointing / "owner.lock").symlink_to(elsewhere / "owner.lock")
    before = sorted(temporary.rglob("*"))
    remove_abandoned()
    assert sorted(temporary.rglob("*")) == before
    mine.remove()
    assert not mine.path.exists()
    assert (kept.path / "raylet.out").exists()
    unused = RayFolder()
    assert not unused.keep()
    assert not unused.path.exists()
