"""A run's lock: who holds it is its keeper, and if nobody can be found holding it, keeper and crew are gone.

It is an flock on keeper.lock, held for life by the keeper and, as a copy of the same descriptor, by each guard. The
system takes it back whatever ended them, which no process id can match. A front end takes the lock before it writes
the first status and hands it to the keeper, so that no moment exists in which a run that is being started looks lost.

Standard library only: the keeper imports it before it detaches.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["RunLock", "boot_id", "is_held"]

_RETRY_S = 0.002


class RunLock:
    """The exclusive lock of one run, for as long as this object is not released."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, wait_s: float = 0.5) -> RunLock | None:
        """Takes the lock; None if somebody holds it.

        Args:
            path: keeper.lock of a run folder; made if it does not exist.
            wait_s: Seconds to go on trying. Whoever only looks (`held`) has it for microseconds, so a short wait tells
                onlookers from holders.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        limit = time.monotonic() + wait_s
        while not _flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= limit:
                os.close(descriptor)
                return None
            time.sleep(_RETRY_S)
        return cls(descriptor)

    @classmethod
    def inherited(cls, descriptor: int, path: Path) -> RunLock | None:
        """The lock that came as an open descriptor from the process that started this one.

        None if the descriptor is not that of `path`, or another descriptor holds the lock.
        """
        os.set_inheritable(descriptor, False)
        try:
            same = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except OSError:
            return None
        return cls(descriptor) if same and _flock(descriptor, fcntl.LOCK_EX) else None

    def fileno(self) -> int:
        return self._descriptor

    def note(self, **facts: Any) -> None:
        """Replaces what stands in the file: who holds it, for people. Nothing is decided by it."""
        text = json.dumps(facts).encode() + b"\n"
        # Blanks and a newline fill what stood there before until it is cut off, so that a reader never sees half.
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)
        os.ftruncate(self._descriptor, len(text))

    def release(self) -> None:
        """Closes this descriptor. Copies in other processes keep the lock."""
        os.close(self._descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock; no when there is no such file. Takes nothing from anybody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def boot_id() -> str:
    """What tells one life of this machine's system from the next; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
