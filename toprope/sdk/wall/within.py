"""A narrower wall within a worker's: what the commands of one rollout may touch.

A worker has many rollouts, whose commands are its processes. Each rollout's own wall leaves them the system, the
worker's interpreter and folders of their own: no other rollout's, no code and data of the environment, no HOME of the
worker. Signals among the worker's processes go on. Without Landlock there is no such wall.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TypeVar

from toprope.sdk.wall import kernel, paths
from toprope.sdk.wall.plan import Plan, entering

__all__ = ["RolloutWall"]

T = TypeVar("T")


class RolloutWall:
    """The wall of one rollout. It counts on the worker's own, which no process can leave.

    Args:
        writes: Folders that the rollout has to itself.
        reads: Further files that its commands read.
    """

    def __init__(self, writes: Sequence[str], reads: Sequence[str] = ()) -> None:
        programs = [*paths.interpreter_paths(sys.executable), *paths.program_paths(os.environ.get("PATH", os.defpath))]
        self._plan = Plan(
            within=True,
            landlock=kernel.landlock_abi(),
            reads=[*paths.SYSTEM, *programs, *reads],
            writes=[*writes],
            devices=paths.devices(),
        )

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs a command, found by PATH, behind this wall."""
        return [*entering(self._plan), *words] if self._plan.landlock else [*words]

    def touch(self, act: Callable[[], T], reads: Sequence[str] = ()) -> T:
        """Call a function that uses files, behind this wall: links that commands left lead to no other rollout.

        Args:
            act: Called in a thread of its own.
            reads: Further files that it reads.
        """
        # A link to /proc/self would lead to this process's own variables.
        plan = asdict(replace(self._plan, reads=[*(path for path in self._plan.reads if path != "/proc"), *reads]))

        def confined() -> T:
            if plan["landlock"]:
                kernel.forbid_new_privileges()
                kernel.restrict_files(kernel.rules(plan), plan["landlock"], signals=True)
            return act()

        with ThreadPoolExecutor(1) as alone:
            return alone.submit(confined).result()
