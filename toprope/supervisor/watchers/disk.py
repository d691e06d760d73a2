"""Pauses a run before its disk is full, and lets it proceed when there is room again.

A run needs the owner's floor and room for the next checkpoint, which is taken to be as large as the newest one. A
member that finds no room (a quota, or a limit that the disk's figures do not show) reports it, which pauses the run as
well; after a while the run may try again.
"""

from __future__ import annotations

import shutil
from typing import Literal

from toprope.records.messages import Checkpointed, NoRoom, Report
from toprope.records.run.folder import folder_bytes
from toprope.records.run.status import Finding
from toprope.supervisor.capacity.reservations import Reservations
from toprope.supervisor.watchers.watcher import RunControl, Watcher

_MB = 1_000_000
_MOST_FLOOR, _FLOOR_SHARE = 500 * _MB, 0.02
_PROCEED_FACTOR = 1.1
"""A paused run proceeds when it finds this multiple of its need, so that it is not paused again at once."""
_TRY_AGAIN_S = 20.0
"""A member that found no room although the disk shows some may try again after so many seconds."""


def default_floor(total: int) -> int:
    """Bytes that stay free if the owner sets no floor: 2 % of the disk, at most 500 MB."""
    return int(min(_MOST_FLOOR, _FLOOR_SHARE * total))


class DiskWatcher(Watcher):
    """Watches the disk that holds a run's folder."""

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._reservations = Reservations(control.folder.path.parent)
        self._checkpoint_bytes = 0
        self._complaint, self._wait_until = "", 0.0
        self._complained = False
        self._paused = self._seen_short = False
        newest = control.folder.newest_checkpoint()
        if newest is not None:
            self._checkpoint_bytes = folder_bytes(newest)

    def on_report(self, component: str, report: Report) -> None:
        match report:
            case NoRoom():
                self._complaint, self._complained = f"{component}: {report.what}", True
            case Checkpointed():
                self._checkpoint_bytes = folder_bytes(self._control.folder.path / report.path)

    def on_tick(self, now: float) -> None:
        try:
            usage = shutil.disk_usage(self._control.folder.path)
        except OSError:
            return  # the keeper notices by itself that the folder is gone
        machine = self._reservations.machine()
        floor = machine.disk_floor if machine is not None else None
        needed = (default_floor(usage.total) if floor is None else floor) + self._checkpoint_bytes
        if self._complained:
            self._complained, self._wait_until = False, now + _TRY_AGAIN_S
        short = usage.free < (needed * _PROCEED_FACTOR if self._paused else needed)
        self._seen_short = self._seen_short or short
        # If the disk's figures showed the lack of room, they also show its end.
        waiting = now < self._wait_until and not self._seen_short
        if (short or waiting) and not self._paused:
            self._pause(usage.free, needed)
        elif self._paused and not short and not waiting:
            self._proceed(usage.free, needed)

    def _pause(self, free: int, needed: int) -> None:
        self._paused = True
        if self._seen_short:
            text = f"The disk has {_mb(free)} left, and the run needs {_mb(needed)}: it is paused; nothing is lost."
        else:
            text = f"A member found no room for its data ({self._complaint}): the run is paused."
        self._record("critical", text, free, needed)
        self._control.pause(text)

    def _proceed(self, free: int, needed: int) -> None:
        self._record("over", f"The disk has {_mb(free)} left: the run proceeds.", free, needed)
        self._paused = self._seen_short = False
        self._complaint, self._wait_until = "", 0.0
        self._control.proceed()

    def _record(self, level: Literal["critical", "over"], text: str, free: int, needed: int) -> None:
        observed: dict[str, int | str] = {
            "free_bytes": free,
            "needed_bytes": needed,
            "checkpoint_bytes": self._checkpoint_bytes,
        }
        if self._complaint:
            observed["complaint"] = self._complaint
        finding = Finding(
            rule="disk_full",
            level=level,
            what=text,
            observed=observed,
            threshold="free space of at least the floor and the newest checkpoint's size",
            source="machine.disk_floor_mb in the owner's settings; without it 2 % of the disk, at most 500 MB",
            confidence="high",
            next=""
            if level == "over"
            else "Make room: `toprope prune` lists the disk use of old runs. The run proceeds by itself when there is "
            "room; stop_training ends it with the last checkpoint that was written.",
        )
        self._control.record_event("finding", **finding.model_dump(mode="json"))


def _mb(count: int) -> str:
    return f"{count / _MB:.1f} MB"
