"""Claims: one attempt of a run never has two keepers, on whatever nodes they start.

The first to create the file of the claim decides. A keeper that an engine started claims before it starts anything; a
front end claims a job that waits before it cancels it.
"""

from __future__ import annotations

import json
import os
import time

from toprope.errors import TopropeError
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.status import Status
from toprope.supervisor.lock import is_held

FRONT_END = "front end"


def claim(folder: RunFolder, attempt: int | str, *, by: str) -> bool:
    """Claim an attempt: True for the first who does, on whatever node. An exclusive creation is atomic where flock is
    not carried from node to node."""
    try:
        folder.crew.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder.crew / f"claim-{attempt}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump({"by": by, "node": os.uname().nodename, "pid": os.getpid(), "at": time.time()}, file)
    return True


def claimed_by_front_end(folder: RunFolder, attempt: int) -> bool:
    """True if a front end took the attempt before its job began."""
    return holder(folder, attempt) == FRONT_END


def holder(folder: RunFolder, attempt: int | str) -> str:
    """The word of the one who claimed the attempt for itself; empty if nobody did."""
    return _read(folder, attempt)[0]


def begun_at(folder: RunFolder, attempt: int) -> float | None:
    """When a keeper claimed the attempt, in seconds since the epoch; None if none did."""
    by, at = _read(folder, attempt)
    return None if by == FRONT_END else at


def _read(folder: RunFolder, attempt: int | str) -> tuple[str, float | None]:
    """Who claimed an attempt, and when; empty and None if nobody did, or the file is not yet written."""
    try:
        record = read_json(folder.crew / f"claim-{attempt}")
        return str(record["by"]), float(record["at"]) if "at" in record else None
    except (TopropeError, KeyError, TypeError, ValueError):
        return "", None


def is_kept(folder: RunFolder) -> bool:
    """True if a keeper or guard holds the run, or a job on a cluster may hold it: it was submitted, and no end is
    written. Asks no engine."""
    try:
        if is_held(folder.lock):
            return True
        return folder.launch.exists() and Status.read(folder).ended_at is None
    except (TopropeError, OSError):
        return True
