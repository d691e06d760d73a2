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
        self._entries: dict[str, tuple[_Fingerprint, Status]] = {}

    def read(self, folder: RunFolder) -> Status:
        """Return the status on disk. The caller must not change it.

        Raises:
            NotFound, Corrupt: As `Status.read`.
        """
        return self._look_up(folder.run_id, f"{folder.path}/status.json") or self._read_anew(folder)

    def _look_up(self, run_id: str, path: str) -> Status | None:
        """Return the cached status if the file at `path` is unchanged."""
        entry = self._entries.get(run_id)
        if entry is None:
            return None
        try:
            file_stat = os.stat(path)
        except OSError:
            return None
        return entry[1] if entry[0] == (file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size) else None

    def unchanged_ended(self, runs: Path) -> dict[str, Status]:
        """Return the cached statuses of ended runs below the folder whose files are unchanged."""
        unchanged = {}
        for run_id in list(self._entries):
            status = self._look_up(run_id, f"{runs}/{run_id}/status.json")
            if status is not None and status.is_over:
                unchanged[run_id] = status
        return unchanged

    def retain(self, run_ids: set[str]) -> None:
        """Drop all other runs from the cache."""
        if len(self._entries) > len(run_ids):
            for run_id in self._entries.keys() - run_ids:
                self._entries.pop(run_id, None)

    def _read_anew(self, folder: RunFolder) -> Status:
        try:
            file_stat = os.stat(folder.status)
        except OSError:
            return Status.read(folder)
        # The file that is read now is this one or a newer one; a newer one is read again next time.
        status = Status.read(folder)
        if time.time_ns() - file_stat.st_mtime_ns > _SETTLED_NS:
            self._entries[folder.run_id] = ((file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size), status)
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
        self._entries: dict[str, _Events] = {}
        self._most, self._size = most, 0

    def read(self, folder: RunFolder, after: int = 0) -> list[Event]:
        """Return the events with a number above `after`, oldest first. The caller must not change them.

        Raises:
            TooNew: A newer version wrote one of them.
        """
        try:
            file_stat = os.stat(folder.events)
        except FileNotFoundError:
            return []
        cached = self._entries.get(folder.run_id)
        if (
            cached is None
            or cached.inode != file_stat.st_ino
            or cached.size > file_stat.st_size
            or cached.after > after
        ):
            cached = _Events(file_stat.st_ino, 0, after, [])
        if cached.size != file_stat.st_size:
            last_seq = cached.events[-1].seq if cached.events else cached.after
            # A new list, because another thread may be reading the old one.
            events = [*cached.events, *read_events(folder.events, last_seq)]
            dropped = len(events) - self._most // 10
            newest, start = (events[dropped:], events[dropped - 1].seq) if dropped > 0 else (events, cached.after)
            self._keep(folder.run_id, _Events(file_stat.st_ino, file_stat.st_size, start, newest))
        else:
            events = cached.events
        return events[bisect_right(events, after, key=lambda event: event.seq) :]

    def _keep(self, run_id: str, cached: _Events) -> None:
        former = self._entries.pop(run_id, None)
        self._size += len(cached.events) + 1 - (len(former.events) + 1 if former else 0)
        self._entries[run_id] = cached
        while self._size > self._most and len(self._entries) > 1:
            try:
                oldest = self._entries.pop(next(iter(self._entries)))
            except (KeyError, RuntimeError, StopIteration):
                return  # another thread removes entries at the same time
            self._size -= len(oldest.events) + 1
