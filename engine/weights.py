"""Memory-mapped safetensors weights of a Hugging Face folder, single file or sharded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdcore.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SAMPLES_PER_TENSOR = 8
_SAMPLE_BYTES = 64


class WeightFiles:
    """Tensors by name. They are views of the mapped files: pages are read when touched, and shared by processes."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError` naming the file that is missing, malformed or cut short."""
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._place: dict[str, Path] = {}
        for path in _weight_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: cannot read these weights: {error}") from error
            self._files[path] = file
            for name in names:
                if name in self._place:
                    raise ModelError(f"{path}: tensor {name} is also in {self._place[name]}")
                self._place[name] = path

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._place)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name` in its stored dtype. Raises `ModelError` if it is missing or of another shape."""
        path = self._place.get(name)
        if path is None:
            raise ModelError(f"{self.folder}: the weights lack {name}")
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot read {name}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"{path}: {name} has dtype {tensor.dtype}; only floating-point weights are supported")
        return tensor

    def fingerprint(self) -> str:
        """Hex digest of every tensor's name, dtype, shape and bytes at a few places: cheap, and the same however the
        tensors are split into files."""
        digest = hashlib.sha256()
        for name in sorted(self._place):
            tensor = self._files[self._place[name]].get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            flat = tensor.reshape(-1).view(torch.uint8)
            last = max(flat.numel() - _SAMPLE_BYTES, 0)
            for sample in range(_SAMPLES_PER_TENSOR):
                start = last * sample // (_SAMPLES_PER_TENSOR - 1)
                digest.update(flat[start : start + _SAMPLE_BYTES].numpy().tobytes())
        return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        raise ModelError(f"{folder}: there is neither model.safetensors nor {_INDEX}")
    try:
        shards = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: cannot be read: {error!r}") from error
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{index}: shards are missing: {', '.join(missing)}")
    return [folder / name for name in shards]
