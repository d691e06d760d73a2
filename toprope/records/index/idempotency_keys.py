"""Keys of start calls, for clients that repeat a call after they got no answer.

A client gives each intended start a key of its own. The first call with a key takes it in one transaction: if two
servers are asked at once, one starts the run and the other answers with that run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from toprope.records.index.database import Index


@dataclass(frozen=True)
class StartKey:
    """A key, its draft, the run that it started, and when (seconds since the epoch)."""

    key: str
    draft_id: str
    run_id: str
    at: float


def take(index: Index, key: str, draft_id: str, run_id: str, stands: Callable[[StartKey], bool]) -> StartKey | None:
    """Take a key for a run that is about to start.

    Args:
        index: The index of this machine.
        key: The client's key.
        stands: Whether the run of a key that is already taken was started, or may still be.

    Returns:
        None if the key now belongs to this run; otherwise the key as another run holds it.

    Raises:
        Corrupt, NotPossibleNow: As for every method of the index.
    """
    with index.writing() as db:
        row = db.execute("SELECT * FROM start_keys WHERE key = ?", (key,)).fetchone()
        if row is not None:
            holder = StartKey(**dict(row))
            if stands(holder):
                return holder
        db.execute("INSERT OR REPLACE INTO start_keys VALUES (?, ?, ?, ?)", (key, draft_id, run_id, time.time()))
    return None


def taken(index: Index, key: str) -> StartKey | None:
    """The holder of a key; None if nobody holds it."""
    with index.reading() as db:
        row = db.execute("SELECT * FROM start_keys WHERE key = ?", (key,)).fetchone() if db else None
        return StartKey(**dict(row)) if row else None


def forget(index: Index, key: str, run_id: str) -> None:
    """Release the key of a run that did not start."""
    with index.writing() as db:
        db.execute("DELETE FROM start_keys WHERE key = ? AND run_id = ?", (key, run_id))
