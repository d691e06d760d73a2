"""Caches statuses and events, so that a home with a thousand runs is listed in milliseconds.

The files remain the truth. A status is cached with inode, time and size of its file, and read again when one of them
differs: status.json is replaced at every write. Events are only ever appended, so only new events are read.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Event, Status, read_events

_SETTLED_NS = 200_000_000
"""A younger file is not cached: if it is replaced within one tick of the file system's clock, it looks the same."""

_Fingerprint = tuple[int, int, int]


class StatusCache:
    """The statuses of one folder of runs, as last read. Safe to use from any number of threads."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Fingerprint, Status]] = {}

    def read(self, folder: RunFolder) -> Status:
        """Return the status on disk. The caller must not change it.

        Raises:
            NotFound, Corrupt: As `Status.read`.
        """
        return self._unchanged(folder.run_id, f"{folder.path}/status.json") or self._read(folder)

    def _unchanged(self, run_id: str, path: str) -> Status | None:
        """Return the cached status if the file at `path` is unchanged."""
        entry = self._known.get(run_id)
        if entry is None:
            return None
        try:
            found = os.stat(path)
        except OSError:
            return None
        return entry[1] if entry[0] == (found.st_ino, found.st_mtime_ns, found.st_size) else None

    def unchanged_ended(self, runs: Path) -> dict[str, Status]:
        """Return the cached statuses of ended runs below the folder whose files are unchanged."""
        unchanged = {}
        for run_id in list(self._known):
            status = self._unchanged(run_id, f"{runs}/{run_id}/status.json")
            if status is not None and status.is_over:
                unchanged[run_id] = status
        return unchanged

    def retain(self, run_ids: set[str]) -> None:
        """Drop all other runs from the cache."""
        if len(self._known) > len(run_ids):
            for run_id in self._known.keys() - run_ids:
                self._known.pop(run_id, None)

    def _read(self, folder: RunFolder) -> Status:
        try:
            found = os.stat(folder.status)
        except OSError:
            return Status.read(folder)
        # The file that is read now is this one or a newer one; a newer one is read again next time.
        status = Status.read(folder)
        if time.time_ns() - found.st_mtime_ns > _SETTLED_NS:
            self._known[folder.run_id] = ((found.st_ino, found.st_mtime_ns, found.st_size), status)
        return status


@dataclass
class _Events:
    inode: int
    size: int
    after: int
    events: list[Event]


class EventCache:
    """The newest events of runs, as last read. Safe to use from any number of threads.

    Args:
        most: Most events to keep, over all runs; of one run, the newest tenth as many. Older ones are read again. An
            event takes half a kilobyte, and a run that saves often has thousands of them.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._known: dict[str, _Events] = {}
        self._most, self._kept = most, 0

    def read(self, folder: RunFolder, after: int = 0) -> list[Event]:
        """Return the events with a number above `after`, oldest first. The caller must not change them.

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
            # A new list, because another thread may be reading the old one.
            events = [*known.events, *read_events(folder.events, last)]
            dropped = len(events) - self._most // 10
            kept, start = (events[dropped:], events[dropped - 1].seq) if dropped > 0 else (events, known.after)
            self._keep(folder.run_id, _Events(found.st_ino, found.st_size, start, kept))
        else:
            events = known.events
        return events[bisect_right(events, after, key=lambda event: event.seq) :]

    def _keep(self, run_id: str, known: _Events) -> None:
        former = self._known.pop(run_id, None)
        self._kept += len(known.events) + 1 - (len(former.events) + 1 if former else 0)
        self._known[run_id] = known
        while self._kept > self._most and len(self._known) > 1:
            try:
                oldest = self._known.pop(next(iter(self._known)))
            except (KeyError, RuntimeError, StopIteration):
                return  # another thread removes entries at the same time
            self._kept -= len(oldest.events) + 1
