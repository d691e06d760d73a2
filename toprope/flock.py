"""Locks on files, which a process holds until it closes them or ends; the system releases them however it ends.

Standard library only: the keeper imports this module before it detaches.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_RETRY_S = 0.002


def taken(path: Path, wait_s: float) -> int | None:
    """Take the exclusive lock of a file and return its descriptor; None if another process holds it.

    Args:
        path: The file; created if missing.
        wait_s: Seconds to go on trying. `is_held` takes the lock for microseconds; a short wait outlasts that.

    Raises:
        OSError: The file cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    limit = time.monotonic() + wait_s
    try:
        while not locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= limit:
                os.close(descriptor)
                return None
            time.sleep(_RETRY_S)
    except OSError:  # a file system without locks
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """True if a process holds the lock; False if it does not, or the file is missing. Takes the lock from nobody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not locked(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def locked(descriptor: int, operation: int) -> bool:
    """Lock an open file without waiting; False if another process holds it."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
