"""Files that commands write: looked at before the work that fills them, written after it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich.console import Console

from cluster.cli.client import EXIT_FAILED, EXIT_USAGE, fail


def check_output(flag: str, path: Path | None) -> None:
    """End the command now if `path`, None for no such file, cannot be written when minutes of work are done."""
    if path is None:
        return
    problem = "it is a folder" if path.is_dir() else None
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        problem = f"{nearest} is not a folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        problem = problem or error.strerror
    if problem is not None:
        allowed = f"a file that can be written ({problem})"
        raise fail(f"{flag}: {str(path)!r} is not allowed; allowed: {allowed}", EXIT_USAGE)


def write_json(path: Path | None, data: object, console: Console) -> None:
    """Write data to `path`, None for nowhere, and say so. Ends the command if that fails."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}", EXIT_FAILED) from error
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
