"""Making the index anew when its file is damaged: from what can still be read of it, and from the folders of runs.

The damaged file is moved aside under a name of its own and never written to. A draft that cannot be read there is made
again of the newest run that was started from it: its environment, its configuration, the same id and revision. Its
history is lost, and so are drafts that no run was started from. The ledger of experiments is a file of its own, which
a new index reads from its beginning.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.errors import Corrupt, NotFound
from toprope.records.index.database import Index
from toprope.records.run.folder import RUN_ID, RunFolder
from toprope.records.run.specification import Specification

__all__ = ["Rebuilt", "move_aside", "rebuild"]

_SIDES = ("-wal", "-shm")
_DRAFT_COLUMNS = "id, created_at, updated_at, preset, environment, knobs, config, revision"


@dataclass
class Rebuilt:
    """What a new index was given."""

    starts: int = 0
    kept: list[str] = field(default_factory=list)
    """Drafts that could be read from the damaged file, with their history."""
    remade: dict[str, str] = field(default_factory=dict)
    """Drafts that were made again, each with the run that it was made of."""
    unreadable: list[str] = field(default_factory=list)
    """Runs whose specification cannot be read."""


def move_aside(path: Path) -> Path:
    """Renames a database with what SQLite keeps beside it; where it lies now. Raises: OSError."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 100):
        aside = path.with_name(f"{path.name}.damaged-{stamp}" + (f"-{number}" if number > 1 else ""))
        try:
            os.link(path, aside)  # unlike a rename it never replaces what is there
        except FileExistsError:
            continue
        for side in _SIDES:
            with suppress(FileNotFoundError):
                os.rename(f"{path}{side}", f"{aside}{side}")
        path.unlink()
        return aside
    raise FileExistsError(f"no free name beside {path}")


def rebuild(index: Index, runs: Path, damaged: Path | None = None) -> Rebuilt:
    """Fills an index with the starts of the runs there are, and the drafts that they came from.

    Args:
        index: There is none at its path, or what is there is sound: what it holds stays.
        runs: The folder of runs.
        damaged: A former file of the index; it is only read.

    Raises:
        NotPossibleNow, Corrupt: The new index cannot be written.
    """
    told = Rebuilt()
    old_drafts, old_edits = _rows(damaged, "drafts"), _rows(damaged, "edits")
    specifications = sorted(_specifications(runs, told), key=lambda one: one.created_at)
    with index.writing() as db:
        for row in old_drafts:
            if _sound(row) and _insert(db, row):
                told.kept.append(str(row["id"]))
        for row in old_edits:
            if row.get("draft_id") in told.kept:
                with suppress(sqlite3.Error):
                    db.execute(
                        "INSERT OR IGNORE INTO edits VALUES (?, ?, ?, ?)",
                        (row["draft_id"], row["revision"], row["at"], row["changes"]),
                    )
        for specification in reversed(specifications):
            draft_id = specification.draft_id
            if draft_id is None or specification.member is not None:
                continue  # a member of a sweep has settings of its own
            told.starts += db.execute(
                "INSERT OR IGNORE INTO starts (run_id, draft_id, revision, kind, at) VALUES (?, ?, ?, ?, ?)",
                (
                    specification.run_id,
                    draft_id,
                    specification.draft_revision or 1,
                    specification.kind,
                    specification.created_at,
                ),
            ).rowcount
            if draft_id not in told.kept and draft_id not in told.remade and _insert(db, _draft_of(specification)):
                told.remade[draft_id] = specification.run_id
    return told


def _specifications(runs: Path, told: Rebuilt) -> Iterator[Specification]:
    for path in sorted(runs.iterdir()) if runs.is_dir() else ():
        if path.is_dir() and RUN_ID.fullmatch(path.name):
            try:
                yield Specification.read(RunFolder(path))
            except (NotFound, Corrupt):
                told.unreadable.append(path.name)


def _draft_of(specification: Specification) -> dict[str, Any]:
    knobs = [{"name": name, "default": value} for name, value in specification.config.environment.knobs.items()]
    return {
        "id": specification.draft_id,
        "created_at": specification.created_at,
        "updated_at": specification.created_at,
        "preset": specification.preset or "",
        "environment": _dump(specification.environment.model_dump(mode="json")),
        "knobs": _dump(knobs),
        "config": _dump(specification.config.model_dump(mode="json")),
        "revision": specification.draft_revision or 1,
    }


def _insert(db: sqlite3.Connection, row: dict[str, Any]) -> bool:
    values = [row[name] for name in _DRAFT_COLUMNS.split(", ")]
    try:
        statement = f"INSERT OR IGNORE INTO drafts ({_DRAFT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        return bool(db.execute(statement, values).rowcount)
    except sqlite3.Error:  # a value of another type than the column's
        return False


def _sound(row: dict[str, Any]) -> bool:
    try:
        shapes = (("environment", dict), ("knobs", list), ("config", dict))
        return all(isinstance(json.loads(row[name]), shape) for name, shape in shapes)
    except (KeyError, TypeError, ValueError):
        return False


def _rows(path: Path | None, table: str) -> list[dict[str, Any]]:
    """What can be read of a table of a damaged database, row by row until it breaks; nothing where it is none."""
    rows: list[dict[str, Any]] = []
    if path is None:
        return rows
    with suppress(sqlite3.Error):
        # immutable: SQLite writes nothing beside it, and a damaged log is not replayed into it.
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            db.row_factory = sqlite3.Row
            for row in db.execute(f"SELECT * FROM {table}"):
                rows.append(dict(row))
    return rows


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
