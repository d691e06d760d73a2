"""The lock of a run: its holder is the run's keeper. If nobody holds it, keeper and crew are gone.

It is an flock on keeper.lock, held by the keeper until it ends and, as a copy of the same descriptor, by each guard.
The system releases it however its holders end, which a process id could not show. A front end takes the lock before it
writes the first status and hands it to the keeper, so that a run that is being started never looks lost.

Standard library only: the keeper imports this module before it detaches.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from toprope.flock import is_held as is_held
from toprope.flock import locked, taken

ALREADY_KEPT = 75
"""Exit code of a keeper that found another one (EX_TEMPFAIL of sysexits)."""


class RunLock:
    """The exclusive lock of one run, held until `release`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, wait_s: float = 0.5) -> RunLock | None:
        """Take the lock; None if another process holds it.

        Args:
            path: keeper.lock of a run folder; created if missing.
            wait_s: Seconds to go on trying.
        """
        descriptor = taken(path, wait_s)
        return None if descriptor is None else cls(descriptor)

    @classmethod
    def from_descriptor(cls, descriptor: int, path: Path) -> RunLock | None:
        """Adopt the lock as an open descriptor that this process inherited.

        Returns:
            The lock; None if the descriptor does not belong to `path`, or another process holds the lock.
        """
        os.set_inheritable(descriptor, False)
        try:
            is_same_file = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except OSError:
            return None
        return cls(descriptor) if is_same_file and locked(descriptor, fcntl.LOCK_EX) else None

    def fileno(self) -> int:
        return self._descriptor

    def write_holder(self, **facts: Any) -> None:
        """Replace the content of the lock's file: facts about the holder and the name of its machine."""
        text = json.dumps({**facts, "node": os.uname().nodename}).encode() + b"\n"
        # Blanks and a newline cover the former text until it is cut off, so that a reader never sees a part of it.
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)
        os.ftruncate(self._descriptor, len(text))

    def release(self) -> None:
        """Close this descriptor. Copies in other processes keep the lock."""
        os.close(self._descriptor)
