"""Limits what an environment's worker uses with everything that it started: memory, processes, threads, disk.

An environment that leaks would take the whole machine down. The kernel bounds what one process allocates, opens and
writes, and where a control group can be made, how many processes and threads there are (toprope.sdk.wall). Everything
else, and slow growth, is watched here: a worker above a limit is ended, the task at work is given up and counted, and
the other rollouts begin anew in the next worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil

from toprope.machine import processes_with
from toprope.sdk.wall.enclosure import most_tasks
from toprope.sdk.wall.groups import ProcessGroup
from toprope.sdk.worker.client import WorkerClient

ADDRESS_SPACE_FACTOR = 2.0
"""The kernel's bound as a multiple of the limit: address space that is never touched counts there, and not here."""
_POLL_S = 0.5
_DISK_EVERY = _EVERYWHERE_EVERY = 4
_MB = 1 << 20
_MEMORY_SHARE = 0.8
"""Of the machine's memory: the limit of a worker without one of its own."""
_DISK_SHARE = 0.5
"""Of the room on the disk when the worker starts: what it may fill."""


@dataclass(frozen=True)
class Used:
    """The use of a worker with everything that it started."""

    memory_mb: float = 0.0
    """Resident."""
    tasks: int = 0
    """Processes and threads."""


class Family:
    """The processes of a worker: its descendants, and those that left it because their parents ended.

    A process that has left is known by the worker's control group, by having been a descendant at an earlier look, or
    by the worker's own folder for temporary files, which it inherits as TMPDIR.

    Args:
        pid: The worker's process.
        group: Its control group, if there is one.
        scratch: Its folder for temporary files; empty: it has none of its own.
    """

    def __init__(self, pid: int, group: ProcessGroup | None = None, scratch: str = "") -> None:
        self._pid, self._group, self._scratch = pid, group, scratch
        self._known: set[psutil.Process] = set()

    def look(self, *, everywhere: bool = True) -> list[psutil.Process]:
        """Its living processes.

        Args:
            everywhere: Search all processes of this machine for its TMPDIR.
        """
        try:
            self._known.add(psutil.Process(self._pid))
        except psutil.Error:
            return []
        for pid in self._group.members() if self._group is not None else ():
            with contextlib.suppress(psutil.Error):
                self._known.add(psutil.Process(pid))
        if everywhere and self._scratch:
            self._known.update(processes_with("TMPDIR", self._scratch))
        self._known = {process for process in self._known if process.is_running()}
        for process in list(self._known):
            with contextlib.suppress(psutil.Error):
                self._known.update(process.children(recursive=True))
        return list(self._known)


def used_by(family: Iterable[psutil.Process]) -> Used:
    """Measure processes; those that are gone count nothing."""
    memory, tasks = 0, 0
    for member in family:
        try:
            with member.oneshot():
                memory += member.memory_info().rss
                tasks += member.num_threads()
        except psutil.Error:
            continue
    return Used(memory / _MB, tasks)


def _measure(family: Family, everywhere: bool) -> Used:
    return used_by(family.look(everywhere=everywhere))


class DiskWatch:
    """The growth of a worker's own folders. They are walked only if their disk lost as much room as they may fill."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders
        self._free = self._room()
        self._held = self._size() if self._free else 0
        self.limit_mb = _DISK_SHARE * self._free / _MB

    def _room(self) -> int:
        try:
            return psutil.disk_usage(self._folders[0]).free
        except (OSError, IndexError):
            return 0

    def _size(self) -> int:
        return sum(size for folder in self._folders for size in _sizes(folder))

    def grown_mb(self) -> float:
        """The growth in MB if it may be above the limit; else 0."""
        if not self._free or (self._free - self._room()) / _MB < self.limit_mb:
            return 0.0
        return (self._size() - self._held) / _MB


def _sizes(folder: str) -> Iterator[int]:
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue


async def watch_worker(worker: WorkerClient, memory_mb: int = 0, poll_s: float = _POLL_S) -> None:
    """Watch a worker until it is gone; end it if it uses too much.

    Args:
        worker: The worker.
        memory_mb: Most memory of it and what it started in MB; 0: most of the machine's.
        poll_s: Seconds between two looks.
    """
    limit_mb = memory_mb or _MEMORY_SHARE * psutil.virtual_memory().total / _MB
    limit_name = f"environment.memory_mb ({memory_mb})" if memory_mb else f"this machine can spare ({limit_mb:.0f})"
    enclosure, looks = worker.enclosure, 0
    disk = (
        None
        if enclosure is None
        else await asyncio.to_thread(DiskWatch, [place for place in (enclosure.scratch, enclosure.home) if place])
    )
    family = Family(worker.pid, enclosure.group if enclosure else None, enclosure.scratch if enclosure else "")

    def end(reason: str) -> None:
        processes = family.look()
        worker.kill(reason)
        for process in processes:  # those that left its process group
            with contextlib.suppress(psutil.Error):
                process.kill()

    while worker.alive:
        used = await asyncio.to_thread(_measure, family, looks % _EVERYWHERE_EVERY == 0)
        if used.memory_mb > limit_mb:
            end(f"The worker had {used.memory_mb:.0f} MB with what it started, more than {limit_name}, and was ended.")
            return
        if used.tasks > most_tasks():
            end(
                f"The worker had {used.tasks} processes and threads with what it started, more than {most_tasks()}, "
                "and was ended."
            )
            return
        looks += 1
        if disk is not None and looks % _DISK_EVERY == 0 and (grown := await asyncio.to_thread(disk.grown_mb)):
            if grown > disk.limit_mb:
                end(
                    f"The worker filled {grown:.0f} MB of its folders, more than half of the room that was left, and "
                    "was ended."
                )
                return
        await asyncio.sleep(poll_s)
