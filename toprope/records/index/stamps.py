"""Status stamps: the numbers of a run that an agent was last given, for several runs at once.

A wait for twenty runs asks four times a second, and every question to the index opens its file.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toprope.records.index.database import Index


@dataclass(frozen=True)
class Stamp:
    """Fresh numbers of a run that an agent was given, when (seconds since the epoch), and up to which event."""

    at: float
    seq: int
    snapshot: dict[str, Any]


def read_stamps(index: Index, run_ids: Collection[str]) -> dict[str, Stamp]:
    """The last stamps of these runs; runs without one are left out. Raises: see `Index`."""
    marks = ", ".join("?" * len(run_ids))
    with index.reading() as db:
        if db is None:
            return {}
        rows = db.execute(f"SELECT run_id, at, seq, snapshot FROM stamps WHERE run_id IN ({marks})", tuple(run_ids))
        return {row["run_id"]: Stamp(row["at"], row["seq"], _snapshot(row["snapshot"])) for row in rows}


def write_stamps(index: Index, stamps: Mapping[str, Stamp]) -> None:
    """Replace the stamps of runs at once; an older stamp never replaces a newer one, unless that lies in the future:
    the machine's clock was set back. Raises: see `Index`."""
    if not stamps:
        return
    rows = [
        (run_id, stamp.at, stamp.seq, json.dumps(stamp.snapshot, ensure_ascii=False, allow_nan=False))
        for run_id, stamp in stamps.items()
    ]
    with index.writing() as db:
        db.executemany(
            "INSERT INTO stamps VALUES (?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET at = excluded.at, "
            "seq = max(seq, excluded.seq), snapshot = excluded.snapshot "
            f"WHERE excluded.at >= stamps.at OR stamps.at > {time.time()}",
            rows,
        )


def forget_stamps(index: Index, run_ids: Collection[str]) -> None:
    """Remove the stamps of deleted runs. Raises: see `Index`."""
    if not run_ids or not index.path.exists():
        return
    with index.writing() as db:
        db.executemany("DELETE FROM stamps WHERE run_id = ?", [(run_id,) for run_id in run_ids])


def _snapshot(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        # `Index.reading` reports it like any damage to the file.
        raise sqlite3.DatabaseError(f"a row is not JSON: {error}") from None
