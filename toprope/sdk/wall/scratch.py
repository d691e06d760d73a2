"""Folders for temporary files that do not outlive their owner for long, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time

__all__ = ["Scratch"]

_PREFIX = "toprope-scratch-"
_YOUNG_S = 60.0
"""A folder of this age may not be claimed yet."""


class Scratch:
    """A new folder below TMPDIR. It is claimed by a lock, which ends with this process: with `remove`, or with the
    first one that a later process makes, the folder goes.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self) -> None:
        self.path = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
        self._claim = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        _lock(self._claim)
        threading.Thread(target=_sweep, args=(os.path.dirname(self.path),), name="sweep", daemon=True).start()

    def remove(self) -> None:
        """Remove the folder with everything in it, once."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1


def _lock(folder: int) -> bool:
    """Claim a folder; False if another process has, or the file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(place: str) -> None:
    """Remove the folders of processes that were killed."""
    for name in os.listdir(place):
        if not name.startswith(_PREFIX):
            continue
        path = os.path.join(place, name)
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # it is another user's, or has just been removed
        try:
            told = os.fstat(folder)
            old = time.time() - told.st_mtime > _YOUNG_S
            if old and told.st_uid == os.geteuid() and stat.S_ISDIR(told.st_mode) and _lock(folder):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(folder)
