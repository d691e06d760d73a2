"""Stamps of several runs at once: what was last told of each, for whoever waits on many.

The table is the index's; a wait asks for twenty runs four times a second, and each question there opens the file anew.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from typing import Any

from toprope.records.index.index import Index, Stamp

__all__ = ["forget_stamps", "keep_stamps", "stamps_of"]


def stamps_of(index: Index, run_ids: Collection[str]) -> dict[str, Stamp]:
    """The last stamps of these runs; those that were never told of are left out. Raises: see `Index`."""
    marks = ", ".join("?" * len(run_ids))
    with index.reading() as db:
        if db is None:
            return {}
        rows = db.execute(f"SELECT run_id, at, seq, snapshot FROM stamps WHERE run_id IN ({marks})", tuple(run_ids))
        return {row["run_id"]: Stamp(row["at"], row["seq"], _snapshot(row["snapshot"])) for row in rows}


def keep_stamps(index: Index, stamps: Mapping[str, Stamp]) -> None:
    """Replaces the stamps of runs, as `Index.set_stamp` does, all of them at once. Raises: see `Index`."""
    if not stamps:
        return
    rows = [
        (run_id, stamp.at, stamp.seq, json.dumps(stamp.snapshot, ensure_ascii=False, allow_nan=False))
        for run_id, stamp in stamps.items()
    ]
    with index.writing() as db:
        db.executemany(
            "INSERT INTO stamps VALUES (?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET at = excluded.at, "
            "seq = max(seq, excluded.seq), snapshot = excluded.snapshot WHERE excluded.at >= stamps.at",
            rows,
        )


def forget_stamps(index: Index, run_ids: Collection[str]) -> None:
    """Removes the stamps of runs that are gone. Raises: see `Index`."""
    if not run_ids or not index.path.exists():
        return
    with index.writing() as db:
        db.executemany("DELETE FROM stamps WHERE run_id = ?", [(run_id,) for run_id in run_ids])


def _snapshot(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        # Within `reading`, which says of the index what is said of any damage to it.
        raise sqlite3.DatabaseError(f"a row is not JSON: {error}") from None
