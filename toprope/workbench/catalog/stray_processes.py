"""Kill processes that an environment leaves behind after a description.

A worker is killed with its process group, and runs have guards. A description has neither keeper nor guard, so
processes in another session are recognised by an inherited environment variable.
"""

from __future__ import annotations

import contextlib
import secrets

from toprope.machine import processes_with

MARK = "TOPROPE_WORKER"
"""Name of the variable."""


def new_mark() -> str:
    """Return a unique value of the variable."""
    return secrets.token_hex(16)


def marked(mark: str) -> set[int]:
    """Return the pids of this user's processes with the mark; processes that cleared their environment escape."""
    import psutil

    pids = set()
    for process in processes_with(MARK, mark):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                pids.add(process.pid)
    return pids


def sweep(mark: str) -> None:
    """Kill this user's processes with the mark; processes that cleared their environment escape."""
    import psutil

    for process in processes_with(MARK, mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
