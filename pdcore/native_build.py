"""Builds a C library on first use and opens it. It is kept in a cache, so that later processes only open it::

    <cache>/<name>-<digest>/<name>.so     the library, then the SHA-256 of its bytes (a loader ignores what follows)

The digest covers the sources, the flags and the kind of machine, so a file never needs to be changed: it is put in
place whole, by a rename. Whichever compiler made it, it does the same: an image without one can be given the cache.
Processes that build at the same time each rename their own, and either will do. A file that was damaged since does
not end in its own checksum, and is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pdcore.errors import PdserveError

logger = logging.getLogger(__name__)

FLAGS = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-shared")
COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT_S = 60.0
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class NativeUnavailable(PdserveError):
    """There is no native code to run; the message says why."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/pdserve/native``, by default ``~/.cache/pdserve/native``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve" / "native"


def open_library(
    name: str,
    folder: Path,
    cache_dir: Path | None = None,
    compilers: Sequence[str] = COMPILERS,
    timeout_s: float = _COMPILE_TIMEOUT_S,
) -> ctypes.CDLL:
    """The library, built if the cache has no intact one.

    Args:
        name: of the library. folder: its sources, every ``.c`` and ``.h`` in it.
        cache_dir: None is `default_cache_dir`. One that cannot be written to costs a build in every process.
        compilers: names or paths; the first that exists is used. timeout_s: of the compilation.

    Raises:
        NativeUnavailable: no library and no compiler, or it failed (with its message), or the library does not open.
    """
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    path = (cache_dir or default_cache_dir()) / f"{name}-{_digest(sources)[:16]}" / f"{name}.so"
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if _is_intact(path):
        try:
            return _open(path)
        except NativeUnavailable as error:  # made where the C library is newer, perhaps
            if compiler is None:
                raise
            logger.info("%s; it is built again", error)
    if compiler is None:
        raise NativeUnavailable("no C compiler")
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as build:
        built = Path(build) / f"{name}.so"
        units = [str(source) for source in sources if source.suffix == ".c"]
        _run([compiler, *FLAGS, "-o", str(built), *units], timeout_s)
        try:
            _install(built, path)
        except OSError as error:
            logger.info("native code cannot be kept in %s (%s): each process builds its own", path.parent, error)
            return _open(built)
    return _open(path)


def _digest(sources: Sequence[Path]) -> str:
    parts = [platform.machine(), *FLAGS]
    for source in sources:
        parts += [source.name, source.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _run(command: Sequence[str], timeout_s: float) -> str:
    """What a command prints. A compiler is several processes; at a time-out all of them are killed."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{command[0]} took more than {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if status != 0:
        raise NativeUnavailable(f"{command[0]} failed with status {status}: {text}")
    return text


def _install(built: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    data = built.read_bytes()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(data + hashlib.sha256(data).digest())
            os.fchmod(file.fileno(), 0o755)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _is_intact(path: Path) -> bool:
    """Whether the file is there, whole, and nobody else's who might have put anything into it."""
    try:
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            data = file.read()
    except OSError:
        return False
    checksum = hashlib.sha256(data[:-_CHECKSUM_BYTES]).digest()
    return owner in (0, os.getuid()) and data[-_CHECKSUM_BYTES:] == checksum


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} does not load: {error}") from error
