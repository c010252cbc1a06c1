"""``pdserve models``: what --model takes on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from engine.model_store import ModelEntry


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    """List the models known by a short name, and those converted before.

    --model also takes a Hugging Face folder (safetensors), a GGUF file, and a hub id where the network allows.

    Examples:

      pdserve models

      pdserve serve --model smollm2-135m
    """
    from engine.model_store import list_models

    entries = list_models()
    if as_json:
        print(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2, default=str))
        return
    table = Table()
    for name in ("model", "state", "size", "source"):
        table.add_column(name, overflow="fold", justify="right" if name == "size" else "left")
    for entry in entries:
        size = f"{entry.size_bytes / 1e6:,.0f} MB" if entry.size_bytes else "-"
        # What is whole below, to be copied, is short here.
        source = Path(entry.source).name if Path(entry.source).is_absolute() else entry.source
        table.add_row(_short_name(entry), entry.state, size, source)
    console = Console()
    console.print(table)
    for entry in entries:
        if entry.path:
            console.print(f"{_short_name(entry)}: {entry.path}", soft_wrap=True, highlight=False)


def _short_name(entry: ModelEntry) -> str:
    """That of a model which is known by its folder is the folder's."""
    return entry.path.name if entry.path is not None and entry.name == str(entry.path) else entry.name
