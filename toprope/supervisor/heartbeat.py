"""A keeper's sign of life, for those who see only its lock, which says that it is there and not that it works.

The keeper sets the time of its lock's file about once a second. One that was suspended (SIGSTOP, a debugger), that
hangs in a dead file system or gets no processor sets nothing, and then front ends say so instead of showing numbers
that look alive. Nothing is decided by it: a keeper that is silent keeps its run.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from toprope.errors import TopropeError
from toprope.records.messages import Report
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.status import Status

__all__ = ["SILENT_AFTER_S", "Heartbeat", "describe_silence"]

SILENT_AFTER_S = 30.0
"""After so long without a sign a keeper is called silent."""


class Heartbeat:
    """The watcher that beats."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def heard(self, component: str, report: Report) -> None:
        """Nothing: reports come and go as the crew works."""

    def looked(self, now: float) -> None:
        """Beats."""
        with suppress(OSError):  # a folder that is gone, a disk that is read-only: others say so
            os.utime(self._folder.lock)


def describe_silence(folder: RunFolder, status: Status) -> str:
    """What is to be said of a keeper that holds its run and gives no sign of life; empty where it does.

    A keeper that is ending its run, or that is of a version without this, is not judged. A clock that was set shows for
    the second until the next beat.
    """
    if status.ended or status.state == "stopping":
        return ""
    try:
        age = time.time() - os.stat(folder.lock).st_mtime
        if age < SILENT_AFTER_S or not read_json(folder.lock).get("beats"):
            return ""
    except (OSError, TopropeError, AttributeError):
        return ""
    return (
        f"Its keeper is there and has given no sign of life for {age:.0f} s: it is suspended, or waits for a disk. "
        "The run goes on when it does; ending the keeper's process makes the run lost, and resumable."
    )
