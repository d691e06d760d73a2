"""Shows that a keeper works, to front ends that see only its lock, which shows that it exists.

The keeper sets the modification time of its lock's file about once a second. A keeper that is suspended (SIGSTOP, a
debugger), hangs in a dead file system or gets no processor does not, and front ends then say so instead of showing
stale numbers. Nothing else follows from it: a silent keeper keeps its run.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from toprope.errors import TopropeError
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.status import Status
from toprope.supervisor.watchers.watcher import Watcher

SILENT_AFTER_S = 30.0
"""A keeper without a sign of life for so long is called silent."""


class Heartbeat(Watcher):
    """Sets the time of the lock's file."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_tick(self, now: float) -> None:
        with suppress(OSError):  # a folder that is gone, a read-only disk: others report those
            os.utime(self._folder.lock)


def describe_silence(folder: RunFolder, status: Status) -> str:
    """Describe the silence of a keeper that holds its run and shows no sign of life; empty if it is not silent.

    A keeper that is ending its run, or whose version sends no heartbeat, is never called silent. After the machine's
    clock is set, the answer may be wrong until the next heartbeat, a second later.
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
        f"The keeper exists but has given no sign of life for {age:.0f} s: it is suspended, or waits for a disk. "
        "The run continues when the keeper does; ending the keeper's process makes the run lost, and resumable."
    )
