"""Statuses that were read before: a home with a thousand runs is listed in milliseconds, not by reading it anew.

The folders stay the truth. A status is remembered with what the system says of its file, and read again whenever that
differs; status.json is replaced at every write, so its inode and its times do.
"""

from __future__ import annotations

import os
import time

from toprope.records.folder import RunFolder
from toprope.records.status import Status

__all__ = ["SeenStatuses"]

_SETTLED_NS = 200_000_000
"""A file younger than this may be replaced within one tick of the file system's clock, and look the same."""

_Print = tuple[int, int, int]


class SeenStatuses:
    """The statuses of one folder of runs, as last read. Any number of threads may ask."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Print, Status]] = {}

    def read(self, folder: RunFolder) -> Status:
        """The status on disk; not to be changed by the caller.

        Raises:
            NotFound, Corrupt: As `Status.read`.
        """
        return self.known(folder.run_id, f"{folder.path}/status.json") or self._read(folder)

    def known(self, run_id: str, path: str) -> Status | None:
        """The status that was read before, if the file at `path` is still the same one."""
        entry = self._known.get(run_id)
        if entry is None:
            return None
        try:
            found = os.stat(path)
        except OSError:
            return None
        return entry[1] if entry[0] == (found.st_ino, found.st_mtime_ns, found.st_size) else None

    def keep_only(self, run_ids: set[str]) -> None:
        """Forgets the runs that are gone."""
        if len(self._known) > len(run_ids):
            for run_id in self._known.keys() - run_ids:
                self._known.pop(run_id, None)

    def _read(self, folder: RunFolder) -> Status:
        try:
            found = os.stat(folder.status)
        except OSError:
            return Status.read(folder)
        # What is read after the look is that file or a newer one: a newer one is read again at the next look.
        status = Status.read(folder)
        if time.time_ns() - found.st_mtime_ns > _SETTLED_NS:
            self._known[folder.run_id] = ((found.st_ino, found.st_mtime_ns, found.st_size), status)
        return status
