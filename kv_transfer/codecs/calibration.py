"""What `tc4` knows of a model: means, directions and steps of its keys and values, kept in a safetensors file.

Such a file is written once per model by ``pdserve calibrate`` and read by every worker that is to use the codec. The
ends of a transfer agree on it by its digest, which covers all that decoding depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pdcore.errors import ConfigError
from pdcore.types import KvGeometry

_KEY: Final = "transfer.calibration"
_FORMAT: Final = "pdserve-tc4-1"
_DTYPES: Final = {"mean": "float32", "basis": "float32", "step": "float32", "inverse_frequencies": "float64"}


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The parameters of a model's `tc4`.

    Heads are taken together in groups of ``width // head_dim``, for a layer's heads resemble each other. L: layers,
    2: K and V, G: groups, W: width.

    Attributes:
        model_digest: of the model it belongs to, as in `KvGeometry`.
        head_dim: elements per head.
        mean: float32 [L, 2, G, W]; of K before its rotation, and of V.
        basis: float32 [L, 2, G, W, W]; columns are orthonormal directions, in order of falling variance.
        step: float32 [L, 2]; what one unit of a coefficient is worth.
        inverse_frequencies: float64 [head_dim / 2]; angle per position of each rotated pair of K (dims i and
            i + head_dim / 2).
    """

    model_digest: str
    head_dim: int
    mean: NDArray[np.float32]
    basis: NDArray[np.float32]
    step: NDArray[np.float32]
    inverse_frequencies: NDArray[np.float64]

    @property
    def width(self) -> int:
        """Elements of a group of heads."""
        return int(self.mean.shape[3])

    @property
    def heads_per_group(self) -> int:
        return self.width // self.head_dim

    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        described = {
            "format": _FORMAT,
            "model_digest": self.model_digest,
            "head_dim": self.head_dim,
            "shapes": {name: list(tensor.shape) for name, tensor in self._tensors().items()},
        }
        total = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        for name, tensor in self._tensors().items():
            total.update(np.ascontiguousarray(tensor, np.dtype(_DTYPES[name]).newbyteorder("<")).data)
        return total.digest()

    def problem(self) -> str | None:
        """What makes it unusable, or None."""
        if self.mean.ndim != 4 or 0 in self.mean.shape:
            return f"mean has shape {self.mean.shape}"
        layers, kinds, groups, width = self.mean.shape
        if kinds != 2 or self.head_dim < 4 or self.head_dim % 4 or width % self.head_dim:
            return f"mean of shape {self.mean.shape} does not fit heads of {self.head_dim} dims"
        expected = {
            "basis": (layers, 2, groups, width, width),
            "step": (layers, 2),
            "inverse_frequencies": (self.head_dim // 2,),
        }
        tensors = self._tensors()
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                return f"{name} has shape {tensors[name].shape}, not {shape}"
        for name, tensor in tensors.items():
            if tensor.dtype != _DTYPES[name]:
                return f"{name} has dtype {tensor.dtype}, not {_DTYPES[name]}"
            if not np.all(np.isfinite(tensor)):
                return f"{name} has elements that are not finite"
        if not np.all(self.step > 0):
            return "a step is not positive"
        return None

    def misfit(self, geometry: KvGeometry) -> str | None:
        """Why it does not belong to a model with this cache, or None."""
        if self.model_digest != geometry.model_digest:
            return f"it was made for model {self.model_digest}, this is {geometry.model_digest}"
        layers, _, groups, _ = self.mean.shape
        ours = (layers, groups * self.heads_per_group, self.head_dim)
        theirs = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
        return None if ours == theirs else f"its layers, heads and head_dim are {ours}, the model's are {theirs}"

    def _tensors(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in _DTYPES}


def file_name(calibration: Calibration, model_name: str) -> str:
    """A name that no other calibration has."""
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in model_name)
    return f"tc4-{plain}-{calibration.digest().hex()[:16]}.safetensors"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it to `path`, whole or not at all. Raises `OSError`."""
    assert calibration.problem() is None, calibration.problem()
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {
        "format": _FORMAT,
        "model_digest": calibration.model_digest,
        "head_dim": str(calibration.head_dim),
        "digest": calibration.digest().hex(),
    }
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(descriptor)
    try:
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in calibration._tensors().items()}
        save_file(tensors, temporary, metadata=described)
        os.chmod(temporary, 0o644)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_calibration(path: Path, geometry: KvGeometry, *, key: str = _KEY) -> Calibration:
    """Read a file and check that it is whole and belongs to a model with this cache; `key`: who names the file.

    Raises:
        ConfigError: it cannot be read, is damaged, or belongs to another model; says which.
    """

    def unusable(problem: str) -> ConfigError:
        return ConfigError(key, str(path), f"a file made by `pdserve calibrate` for this model ({problem})")

    if not path.is_file():
        raise unusable("it is a folder" if path.is_dir() else "there is no such file")
    try:
        with safe_open(path, framework="numpy") as file:
            described = file.metadata() or {}
            if described.get("format") != _FORMAT:
                raise unusable(f"its format is {described.get('format')!r}, not {_FORMAT!r}")
            calibration = Calibration(
                described["model_digest"],
                int(described["head_dim"]),
                **{name: file.get_tensor(name) for name in _DTYPES},
            )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise unusable(f"it is damaged, or no such file at all: {error}") from error
    problem = calibration.problem() or calibration.misfit(geometry)
    if problem is None and calibration.digest().hex() != described.get("digest"):
        problem = "its contents do not have the digest that it states"
    if problem is not None:
        raise unusable(problem)
    return calibration
