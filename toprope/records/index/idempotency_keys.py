"""Which call started which run, for clients that repeat a call of which they got no answer.

A client gives each start that it means a key of its own. The first call with a key takes it, in one transaction: of two
servers that are asked at once one starts, and the other answers with that run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from toprope.records.index.database import Index

__all__ = ["StartKey", "forget", "take", "taken"]


@dataclass(frozen=True)
class StartKey:
    """A key, the draft that it was given with, the run that it stands for, and when (seconds since the epoch)."""

    key: str
    draft_id: str
    run_id: str
    at: float


def take(index: Index, key: str, draft_id: str, run_id: str, stands: Callable[[StartKey], bool]) -> StartKey | None:
    """Takes a key for a run that is about to start.

    Args:
        index: The machine's.
        key: The client's.
        draft_id: The draft that the run is of.
        run_id: The run.
        stands: Whether the run of a key that was taken before was started, or may still be.

    Returns:
        None where the key is now this run's; else the one that has it.

    Raises:
        Corrupt, NotPossibleNow: As every method of the index.
    """
    with index.writing() as db:
        row = db.execute("SELECT * FROM start_keys WHERE key = ?", (key,)).fetchone()
        if row is not None:
            taken = StartKey(**dict(row))
            if stands(taken):
                return taken
        db.execute("INSERT OR REPLACE INTO start_keys VALUES (?, ?, ?, ?)", (key, draft_id, run_id, time.time()))
    return None


def taken(index: Index, key: str) -> StartKey | None:
    """Who has a key; None where nobody does."""
    with index.reading() as db:
        row = db.execute("SELECT * FROM start_keys WHERE key = ?", (key,)).fetchone() if db else None
        return StartKey(**dict(row)) if row else None


def forget(index: Index, key: str, run_id: str) -> None:
    """Gives a key back, of a run that did not start."""
    with index.writing() as db:
        db.execute("DELETE FROM start_keys WHERE key = ? AND run_id = ?", (key, run_id))
