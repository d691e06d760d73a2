"""Ends what an environment started and left when it was only described.

A worker is killed with its process group, and a run has guards besides. A description has no keeper, so what its worker
put into a session of its own is known by a variable that it inherits.
"""

from __future__ import annotations

import secrets

__all__ = ["MARK", "marked", "new_mark", "sweep"]

MARK = "TOPROPE_WORKER"
"""The variable."""


def new_mark() -> str:
    """A value of it that no other worker has."""
    return secrets.token_hex(16)


def marked(mark: str) -> set[int]:
    """Ids of the processes of this user that carry a mark. One that cleared its environment is not seen."""
    import psutil

    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def sweep(mark: str) -> None:
    """Kills the processes of this user that carry a mark. One that cleared its environment escapes."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except (psutil.Error, OSError):
            continue
