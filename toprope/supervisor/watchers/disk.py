"""A disk that fills pauses its run before anything is lost, and lets it go on when there is room again.

What is needed is the owner's floor and room for the next checkpoint, as large as the newest one. Members that find no
room themselves (a quota, a limit that the disk's figures do not show) say so, which pauses the run as well; after a
while it is let go on to see whether there is room now. What members warn of goes into the run's events here, too.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from toprope.records.messages import Checkpointed, NoRoom, Report, Warned
from toprope.records.run.status import Finding
from toprope.supervisor.capacity.reservations import Reservations

if TYPE_CHECKING:
    from toprope.supervisor.watchers.watcher import RunControl

__all__ = ["DiskWatcher", "default_floor"]

_MB = 1_000_000
_MOST_FLOOR, _FLOOR_SHARE = 500 * _MB, 0.02
_AGAIN = 1.1
"""A paused run goes on when there is so much more than it needs: not to be paused again at once."""
_TRY_AGAIN_S = 20.0
"""A member that found no room where the disk shows some is let try again after so many seconds."""


def default_floor(total: int) -> int:
    """Bytes that stay free where the owner says nothing: 2 % of the disk, at most 500 MB."""
    return int(min(_MOST_FLOOR, _FLOOR_SHARE * total))


class DiskWatcher:
    """The watcher of the disk that holds a run's folder."""

    def __init__(self, hands: RunControl) -> None:
        self._hands = hands
        self._reservations = Reservations(hands.folder.path.parent)
        self._checkpoint = 0
        self._complaint, self._held_until = "", 0.0
        self._complained = False
        self._paused = self._seen_short = False
        newest = hands.folder.newest_checkpoint()
        if newest is not None:
            self._checkpoint = _size(newest)

    def heard(self, component: str, report: Report) -> None:
        """See `Watcher.heard`."""
        match report:
            case Warned():
                self._hands.event("warning", what=f"{component}: {report.what}")
            case NoRoom():
                self._complaint, self._complained = f"{component}: {report.what}", True
            case Checkpointed():
                self._checkpoint = _size(self._hands.folder.path / report.path)

    def looked(self, now: float) -> None:
        """See `Watcher.looked`."""
        try:
            usage = shutil.disk_usage(self._hands.folder.path)
        except OSError:
            return  # a folder that is gone is the course's affair
        machine = self._reservations.machine()
        floor = machine.disk_floor if machine is not None and machine.disk_floor is not None else None
        needed = (default_floor(usage.total) if floor is None else floor) + self._checkpoint
        if self._complained:
            self._complained, self._held_until = False, now + _TRY_AGAIN_S
        short = usage.free < (needed * _AGAIN if self._paused else needed)
        self._seen_short = self._seen_short or short
        # Where the disk's own figures told, they also tell when there is room.
        waits = now < self._held_until and not self._seen_short
        if (short or waits) and not self._paused:
            self._pause(usage.free, needed)
        elif self._paused and not short and not waits:
            self._proceed(usage.free, needed)

    def _pause(self, free: int, needed: int) -> None:
        self._paused = True
        if self._seen_short:
            what = (
                f"The disk has {_mb(free)} left, and the run needs {_mb(needed)}: it is paused and keeps what it has."
            )
        else:
            what = f"There was no room for what a member had to write ({self._complaint}): the run is paused."
        self._finding("critical", what, free, needed)
        self._hands.pause(what)

    def _proceed(self, free: int, needed: int) -> None:
        self._finding("over", f"The disk has {_mb(free)} left: the run goes on.", free, needed)
        self._paused = self._seen_short = False
        self._complaint, self._held_until = "", 0.0
        self._hands.proceed()

    def _finding(self, level: str, what: str, free: int, needed: int) -> None:
        observed = {"free_bytes": free, "needed_bytes": needed, "checkpoint_bytes": self._checkpoint}
        if self._complaint:
            observed["complaint"] = self._complaint
        finding = Finding(
            rule="disk_full",
            level=level,
            what=what,
            observed=observed,
            threshold="free space of at least the floor and the newest checkpoint's size",
            source="machine.disk_floor_mb in the owner's settings; without it 2 % of the disk, at most 500 MB",
            confidence="high",
            next=""
            if level == "over"
            else "Make room: `toprope prune` shows what old runs hold. The run goes on by "
            "itself when there is room; stop_training ends it with the last checkpoint that was written.",
        )
        self._hands.event("finding", **finding.model_dump(mode="json"))


def _size(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _mb(count: int) -> str:
    return f"{count / _MB:.1f} MB"
