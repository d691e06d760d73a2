"""Folders for temporary files that do not outlive their owner for long, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from functools import cache

__all__ = ["Scratch", "sweep_scratch"]

_NEW = "new-"
"""Begins the rest of a name whose folder may not be claimed yet."""
_YOUNG_S = 60.0
"""Age up to which such a folder stays."""


@cache
def _prefix() -> str:
    """The names of this machine's folders: nodes may share TMPDIR, and not every file system carries a lock to them."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            machine = file.read()
    except OSError:
        machine = os.uname().nodename.encode()
    return f"toprope-{zlib.crc32(machine) & 0xFFFFFF:06x}-"


class Scratch:
    """A new folder below TMPDIR. It is claimed by a lock, which ends with this process: with `remove`, with
    `sweep_scratch`, or with the first one that a later process makes, the folder goes.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self) -> None:
        new_path = os.path.realpath(tempfile.mkdtemp(prefix=_prefix() + _NEW))
        self._claim = -1
        try:
            self._claim = os.open(new_path, os.O_RDONLY | os.O_DIRECTORY)
            _lock(self._claim)
            self.path = new_path.replace(_prefix() + _NEW, _prefix())
            os.rename(new_path, self.path)
        except OSError:
            if self._claim >= 0:
                os.close(self._claim)
            os.rmdir(new_path)
            raise
        _sweep_once(os.path.dirname(self.path))  # once for each TMPDIR

    def remove(self) -> None:
        """Remove the folder with everything in it, once."""
        _remove(self.path)
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1


def sweep_scratch(wait_s: float = 2.0) -> None:
    """Remove the folders whose owners on this machine were killed, in a thread.

    Args:
        wait_s: The longest to wait for it; a caller that ends leaves the rest to the next one.
    """
    with suppress(RuntimeError, OSError):  # no thread, or no folder for temporary files, as on a full disk
        place = os.path.realpath(tempfile.gettempdir())
        thread = threading.Thread(target=_sweep, args=(place,), name="sweep", daemon=True)
        thread.start()
        thread.join(wait_s)


def _lock(folder: int) -> bool:
    """Claim a folder; False if another process has, or the file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # more than a thousand folders in each other; no interpreter before 3.13 removes them
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


@cache
def _sweep_once(place: str) -> None:
    sweep_scratch(wait_s=0.0)


def _sweep(place: str) -> None:
    """Remove the folders of processes of this machine that were killed."""
    with suppress(OSError):
        for name in os.listdir(place):
            if name.startswith(_prefix()):
                with suppress(OSError):  # it is another user's, or has just been removed
                    _remove_unclaimed(os.path.join(place, name))


def _remove_unclaimed(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        new = os.path.basename(path).startswith(_prefix() + _NEW)
        young = new and abs(time.time() - status.st_mtime) <= _YOUNG_S
        if status.st_uid == os.geteuid() and not young and _lock(folder):
            _remove(path)
    finally:
        os.close(folder)
