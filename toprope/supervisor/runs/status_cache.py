"""What was read of runs before: a home with a thousand of them is listed in milliseconds, not by reading it anew.

The folders stay the truth. A status is remembered with what the system says of its file, and read again whenever that
differs; status.json is replaced at every write, so its inode and its times do. Events are only ever added, so what is
behind those that are known is read.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Event, Status, read_events

__all__ = ["EventCache", "StatusCache"]

_SETTLED_NS = 200_000_000
"""A file younger than this may be replaced within one tick of the file system's clock, and look the same."""

_Print = tuple[int, int, int]


class StatusCache:
    """The statuses of one folder of runs, as last read. Any number of threads may ask."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Print, Status]] = {}
        self._ended: dict[str, tuple[_Print, Status]] = {}

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

    def over(self, runs: Path) -> dict[str, Status]:
        """Runs below the folder that had ended when they were read, and whose files are still the same ones."""
        same, stat, base = {}, os.stat, f"{runs}/"
        for run_id, ((inode, changed_ns, size), status) in list(self._ended.items()):
            try:
                found = stat(f"{base}{run_id}/status.json")
            except OSError:
                continue
            if found.st_mtime_ns == changed_ns and found.st_ino == inode and found.st_size == size:
                same[run_id] = status
        return same

    def keep_only(self, run_ids: set[str]) -> None:
        """Forgets the runs that are gone."""
        if len(self._known) > len(run_ids):
            for run_id in self._known.keys() - run_ids:
                self._known.pop(run_id, None)
                self._ended.pop(run_id, None)

    def _read(self, folder: RunFolder) -> Status:
        try:
            found = os.stat(folder.status)
        except OSError:
            return Status.read(folder)
        # What is read after the look is that file or a newer one: a newer one is read again at the next look.
        status = Status.read(folder)
        if time.time_ns() - found.st_mtime_ns > _SETTLED_NS:
            entry = ((found.st_ino, found.st_mtime_ns, found.st_size), status)
            self._known[folder.run_id] = entry
            if status.ended and status.ended_at is not None:
                self._ended[folder.run_id] = entry
            else:
                self._ended.pop(folder.run_id, None)
        return status


@dataclass
class _Events:
    inode: int
    size: int
    after: int
    events: list[Event]


class EventCache:
    """The newest events of runs, as last read. Any number of threads may ask."""

    def __init__(self, most: int = 20_000) -> None:
        self._known: dict[str, _Events] = {}
        self._most, self._kept = most, 0

    def read(self, folder: RunFolder, after: int = 0) -> list[Event]:
        """Events with a number above `after`, oldest first; not to be changed by the caller.

        Raises:
            TooNew: A newer version wrote one of them.
        """
        try:
            found = os.stat(folder.events)
        except FileNotFoundError:
            return []
        known = self._known.get(folder.run_id)
        if known is None or known.inode != found.st_ino or known.size > found.st_size or known.after > after:
            known = _Events(found.st_ino, 0, after, [])
        if known.size != found.st_size:
            last = known.events[-1].seq if known.events else known.after
            # Another list, not a longer one: another thread may be reading the former.
            events = [*known.events, *read_events(folder.events, last)]
            known = _Events(found.st_ino, found.st_size, known.after, events)
            self._keep(folder.run_id, known)
        return known.events[bisect_right(known.events, after, key=lambda event: event.seq) :]

    def _keep(self, run_id: str, known: _Events) -> None:
        former = self._known.pop(run_id, None)
        self._kept += len(known.events) + 1 - (len(former.events) + 1 if former else 0)
        self._known[run_id] = known
        while self._kept > self._most and len(self._known) > 1:
            try:
                oldest = self._known.pop(next(iter(self._known)))
            except (KeyError, RuntimeError, StopIteration):
                return  # another thread does the same
            self._kept -= len(oldest.events) + 1
