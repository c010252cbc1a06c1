"""What the engine's benchmarks share: a table of rows, and the file that `--json` names."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np


def print_table(title: str, rows: Sequence[Any]) -> None:
    """Print dataclass instances of one kind, one a line, under the names of their fields."""
    entries = [{key: _cell(value) for key, value in asdict(row).items()} for row in rows]
    widths = {key: max(len(key), *(len(entry[key]) for entry in entries)) for key in entries[0]}
    print(f"\n{title}")
    for line in ({key: key for key in widths}, *entries):
        print("  ".join(f"{line[key]:>{width}}" for key, width in widths.items()))


def _cell(value: object) -> str:
    """A number with its thousands apart; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def milliseconds(seconds: Iterable[float], *percentiles: float) -> list[float | None]:
    """Percentiles of times, in milliseconds; None if there are no times."""
    found = list(seconds)
    return [round(1e3 * float(np.percentile(found, p)), 1) if found else None for p in percentiles]


def machine() -> dict[str, float | int | None]:
    """What else the figures depend on: cores, and how busy they were."""
    return {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}


def write_json(
    file: Path | None, args: argparse.Namespace, start: Mapping[str, Any], tables: Mapping[str, Sequence[Any]]
) -> None:
    """Write settings, `machine` as of the `start` and the end, and the rows of each table; nothing without a file."""
    if file is None:
        return
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    data = {"settings": settings, "machine": {"start": start, "end": machine()}}
    data |= {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    file.write_text(json.dumps(data, indent=2) + "\n")
