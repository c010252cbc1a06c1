"""Where calibrations are kept on this machine."""

from __future__ import annotations

from pathlib import Path

from engine.model_store import default_cache_dir
from kv_transfer.codecs.calibration import Calibration, load_calibration
from pdcore.errors import ConfigError
from pdcore.types import KvGeometry

CALIBRATION_FILES = "tc4-*.safetensors"
"""The names of those that are kept."""


def default_calibration_dir() -> Path:
    """``$XDG_CACHE_HOME/pdserve/calibrations``, by default ``~/.cache/pdserve/calibrations``."""
    return default_cache_dir().parent / "calibrations"


def find_calibration(geometry: KvGeometry, folder: Path) -> tuple[Path, Calibration] | None:
    """The newest usable file in `folder` that was made for a model with this cache; None if there is none."""
    files = sorted(folder.glob(CALIBRATION_FILES), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in files:
        try:
            return path, load_calibration(path, geometry)
        except ConfigError:
            continue  # of another model, or damaged
    return None
