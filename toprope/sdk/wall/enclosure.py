"""One worker's wall as its caller holds it: command line, scratch folder, control group, relay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toprope.sdk.errors import WorkerDied
from toprope.sdk.wall.groups import ProcessGroup
from toprope.sdk.wall.plan import Plan, Wall, command_for, level_here, plan_for, variables_behind
from toprope.sdk.wall.relay import Relay
from toprope.sdk.wall.scratch import Scratch

__all__ = ["DESCRIPTORS", "Enclosure", "most_tasks"]

DESCRIPTORS = 65_536
"""Open files of one process, if the machine's own limit is not lower: packages that run many programs ask for these."""
_LARGEST_FILE_MB = 1 << 16


def most_tasks() -> int:
    """Processes and threads of a worker with everything that it started."""
    return max(1024, 32 * (os.cpu_count() or 1))


@dataclass
class Enclosure:
    """Create it with `Enclosure.prepare`; `remove` ends it, and must follow the end of the worker."""

    command: list[str]
    variables: dict[str, str]
    """The worker's whole environment."""
    cwd: str
    """Its working directory."""
    scratch: str
    """Its folder for temporary files, which ends with it; empty if the disk is full."""
    home: str
    level: str
    """`landlock`, `bubblewrap`, `none`, or `trusted`."""
    lacks: str
    """Parts of the wall that this machine lacks; empty if none."""
    folder: Scratch | None = None
    """That of `scratch`."""
    group: ProcessGroup | None = None
    relay: Relay | None = None

    @classmethod
    def prepare(cls, wall: Wall, command: Sequence[str], variables: Mapping[str, str], cwd: str | None) -> Enclosure:
        """Make everything that a worker's wall needs.

        Args:
            wall: What the worker may do.
            command: Its interpreter and arguments.
            variables: Its environment without a wall.
            cwd: Its folder; the scratch folder if None.

        Raises:
            WorkerDied: The wall cannot be built as it is required, or the disk has no room.
        """
        variables = {name: value for name, value in variables.items() if name not in wall.withheld}
        python = _absolute(command[0], variables)
        folder, home = _folders(wall)
        scratch, enclosure = folder.path if folder else "", None
        try:
            plan = plan_for(wall, python, variables, writes=[place for place in (scratch, home, cwd) if place])
            plan.scratch = scratch
            plan.descriptors, plan.disk_mb, plan.tasks = DESCRIPTORS, _LARGEST_FILE_MB, most_tasks()
            level, lacks = level_here()
            enclosure = cls(
                command=[],
                variables=variables_behind(variables, plan, scratch, home),
                cwd=cwd or (os.getcwd() if wall.trusted else scratch or "/"),
                scratch=scratch,
                home=home,
                level="trusted" if wall.trusted else level,
                lacks="" if wall.trusted else lacks,
                folder=folder,
            )
            enclosure._fill(plan, wall, [python, *command[1:]])
        except BaseException:
            if enclosure is not None:
                enclosure.remove()
            elif folder is not None:
                folder.remove()
            raise
        return enclosure

    @classmethod
    async def prepare_in_thread(
        cls, wall: Wall, command: Sequence[str], variables: Mapping[str, str], cwd: str | None
    ) -> Enclosure:
        """Like `prepare`, in a thread. If the caller is cancelled, everything made is removed.

        Raises:
            WorkerDied: See `prepare`.
        """
        made: list[Enclosure] = []
        abandoned = threading.Event()

        def discard() -> None:
            with contextlib.suppress(IndexError):  # the other thread did it, or nothing is made yet
                enclosure = made.pop()
                for descriptor in enclosure.passed:
                    os.close(descriptor)
                enclosure.remove()

        def prepare() -> None:
            made.append(cls.prepare(wall, command, variables, cwd))
            if abandoned.is_set():
                discard()

        try:
            await asyncio.to_thread(prepare)
        except BaseException:
            abandoned.set()
            discard()
            raise
        return made[0]

    def _fill(self, plan: Plan, wall: Wall, command: Sequence[str]) -> None:
        self.group = ProcessGroup.make(most_tasks(), wall.memory_mb)
        if self.group is not None:
            plan.groups.append(self.group.path)
        if wall.network == "own":
            self.relay = Relay()
            plan.listener_maker = self.relay.theirs
        self.command = command_for(plan, command, self.cwd)

    @property
    def passed(self) -> tuple[int, ...]:
        """Descriptors that the command inherits and the caller then closes."""
        return () if self.relay is None else (self.relay.theirs,)

    def kill(self) -> None:
        """End every process of the worker that the kernel counts as its own."""
        if self.group is not None:
            self.group.kill()

    def remove(self) -> None:
        """End what is left, and remove the scratch folder."""
        if self.relay is not None:
            self.relay.close()
        if self.group is not None:
            self.group.remove()
        if self.folder is not None:
            self.folder.remove()


def _folders(wall: Wall) -> tuple[Scratch | None, str]:
    """Make a worker's scratch folder and HOME; none on a full disk, where a worker that writes nothing still works."""
    try:
        folder = Scratch()
    except OSError:
        return None, wall.home or ""
    home = wall.home or os.path.join(folder.path, "home")
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
    except OSError:
        home = folder.path
    return folder, home


def _absolute(python: str, variables: Mapping[str, str]) -> str:
    program = shutil.which(python, path=variables.get("PATH"))
    if program is None:
        raise WorkerDied(f"The worker cannot be started by {python}: there is no such program.")
    return os.path.abspath(program) if python != sys.executable else python
