"""The folder of a Ray of our own, and what is left of those whose owners have been killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "pdserve-ray-"
_OWNER = "owner.lock"


class RayFolder:
    """A new folder for a Ray's logs and sockets, among the temporary files.

    A file in it is locked for as long as this process lives: the kernel lets go of it however that ends. So a folder
    whose file can be locked is nobody's any more, whatever has become of process numbers. A folder without such a
    file is not judged.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked under another name first: one that is found is locked, or its owner is dead.
        new = self.path / f"{_OWNER}.new"
        self._lock: int | None = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # no locks here; then nobody judges it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _OWNER)

    def keep(self) -> bool:
        """Leave it to whoever wants to read it, for ever; False if there was nothing to read, so that it is gone."""
        (self.path / _OWNER).unlink(missing_ok=True)
        try:
            self.path.rmdir()
            kept = False
        except OSError:
            kept = True
        self._let_go()
        return kept

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners have died without doing so. Never raises for one of them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Raises OSError if it cannot be told, or somebody has it."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        mine = os.fstat(lock)
        if not stat.S_ISREG(mine.st_mode) or mine.st_uid != os.geteuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in folder.iterdir():
            if entry.name == _OWNER:
                continue  # last: what cannot be removed now is known as abandoned next time
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if [entry.name for entry in folder.iterdir()] == [_OWNER]:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
