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
    refused = f"{flag}: {str(path)!r} is not allowed; allowed: a file that can be written"
    if path.is_dir():
        raise fail(f"{refused} (it is a folder)", EXIT_USAGE)
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise fail(f"{refused} ({nearest} is not a folder)", EXIT_USAGE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise fail(f"{refused} ({error.strerror})", EXIT_USAGE) from error


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
