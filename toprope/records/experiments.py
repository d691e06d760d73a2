"""The ledger of experiments: hypotheses, their runs, outcomes and decisions.

Its truth is `ledger.jsonl` in the home, which people can read: every change appends a line, and nothing replaces the
file. The table in the index is a view of it for reading by environment; a new, restored or rebuilt index reads the file
again from the start.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ValidationError

from toprope.atomic import append
from toprope.errors import NotFound, NotPossibleNow, shown
from toprope.records.index.database import Index

Decision = Literal["keep", "discard", "repeat", "undecided"]
_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_GOAL = "goal:"
_LOCK_WITHIN_S = 20.0


class Figures(BaseModel):
    """Measurements of a run at the time of the entry; the run itself may be pruned later."""

    state: str
    accuracy: float | None = None
    """On held-out tasks, after training."""
    low: float | None = None
    high: float | None = None
    tasks: int | None = None
    before: float | None = None
    steps: int = 0
    seed: int = 0
    configuration: str = ""
    """Hash of the configuration without its seed; runs with the same hash differ by chance alone."""
    measured: str = ""
    """Hash of what decides the measured tasks; accuracies on other tasks say nothing of each other. Empty: unknown."""


class Experiment(BaseModel):
    """One entry. An amendment appends the whole entry again."""

    id: str
    at: float
    updated_at: float
    environment: str
    hypothesis: str
    runs: list[str] = []
    drafts: list[str] = []
    outcome: str = ""
    decision: Decision = "undecided"
    question: str = ""
    """The question that it leaves open."""
    figures: dict[str, Figures] = {}
    """By run."""

    @property
    def accuracy(self) -> float | None:
        """The mean over its runs; None if none was measured."""
        known = [one.accuracy for one in self.figures.values() if one.accuracy is not None]
        return sum(known) / len(known) if known else None


class Ledger:
    """The ledger of one home.

    Args:
        index: The index that holds the view.
        path: ledger.jsonl.

    Raises (every method): Corrupt and NotPossibleNow as `Index` does; NotPossibleNow if the file cannot be written.
    """

    def __init__(self, index: Index, path: Path) -> None:
        self._index, self.path = index, path

    @contextmanager
    def amending(self) -> Iterator[None]:
        """Hold the lock under which an entry is read and stored again, so that no amendment is lost.

        Raises:
            NotPossibleNow: Another process holds it for too long, or its file cannot be created.
        """
        lock = FileLock(f"{self.path}.lock", timeout=_LOCK_WITHIN_S, mode=0o600)
        try:
            held = lock.acquire()
        except OSError as error:
            raise NotPossibleNow(f"{lock.lock_file} cannot be locked: {error}.", hint="Call again.") from None
        with held:
            yield

    def put(self, entry: Experiment) -> Experiment:
        """Store a new or amended entry."""
        entry = entry.model_copy(update={"updated_at": time.time()})
        self._append({"v": 1, "op": "experiment", **entry.model_dump(mode="json")})
        return entry

    def set_goal(self, environment: str, goal: str) -> None:
        """Store the goal for an environment."""
        self._append({"v": 1, "op": "goal", "environment": environment, "goal": goal, "at": time.time()})

    def new_id(self) -> str:
        """A free id such as `exp-7f3k`."""
        with self._view() as db:
            while True:
                found = "exp-" + "".join(secrets.choice(_ALPHABET) for _ in range(4))
                if db is None or db.execute("SELECT 1 FROM experiments WHERE id = ?", (found,)).fetchone() is None:
                    return found

    def get(self, experiment_id: str) -> Experiment:
        """An entry.

        Raises:
            NotFound: No entry has that id; the message names the latest.
        """
        with self._view() as db:
            row = db.execute("SELECT entry FROM experiments WHERE id = ?", (experiment_id,)).fetchone() if db else None
        if row is None or experiment_id.startswith(_GOAL):
            latest = [entry.id for entry in self.entries(limit=5)]
            hint = f"The latest: {', '.join(latest)}." if latest else "There are none yet; omit experiment_id."
            raise NotFound(f"There is no experiment {shown(experiment_id)}.", hint=hint)
        return Experiment.model_validate_json(row["entry"])

    def entries(self, environment: str | None = None, limit: int = 1000) -> list[Experiment]:
        """Entries, the newest first."""
        where, values = ("AND environment = ?", (environment,)) if environment is not None else ("", ())
        with self._view() as db:
            if db is None:
                return []
            rows = db.execute(
                f"SELECT entry FROM experiments WHERE id NOT LIKE 'goal:%' {where} ORDER BY at DESC, id LIMIT ?",
                (*values, limit),
            ).fetchall()
        return [Experiment.model_validate_json(row["entry"]) for row in rows]

    def goals(self) -> dict[str, str]:
        """Goals by environment."""
        with self._view() as db:
            rows = (
                db.execute("SELECT environment, entry FROM experiments WHERE id LIKE 'goal:%' ORDER BY at").fetchall()
                if db
                else []
            )
        return {row["environment"]: json.loads(row["entry"])["goal"] for row in rows}

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            append(self.path, data)
        except OSError as error:
            raise NotPossibleNow(
                f"{self.path} cannot be written: {error.strerror or error}.", hint="Check the room on that disk."
            ) from None

    def _view(self) -> _View:
        return _View(self._index, self.path)


class _View:
    """Context manager over the table, after it has caught up with the file."""

    def __init__(self, index: Index, path: Path) -> None:
        self._index, self._path = index, path
        self._reading: AbstractContextManager[sqlite3.Connection | None] | None = None

    def __enter__(self) -> sqlite3.Connection | None:
        self._catch_up()
        self._reading = self._index.reading()
        return self._reading.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._reading is not None:
            self._reading.__exit__(*raised)

    def _catch_up(self) -> None:
        try:
            size = self._path.stat().st_size
            with self._path.open("rb") as file:
                first = file.readline(1 << 20).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            size, first = 0, ""
        with self._index.reading() as db:
            read = db.execute("SELECT bytes, first_line FROM ledger_read").fetchone() if db else None
        if (read is None and not size) or (read is not None and (read["bytes"], read["first_line"]) == (size, first)):
            return
        with self._index.writing() as db:
            read = db.execute("SELECT bytes, first_line FROM ledger_read").fetchone()
            done = read["bytes"] if read is not None and read["first_line"] == first and read["bytes"] <= size else 0
            if not done:
                db.execute("DELETE FROM experiments")
            for end, line in _lines(self._path, done):
                done = end
                _apply(db, line)
            db.execute("INSERT OR REPLACE INTO ledger_read VALUES (1, ?, ?)", (done, first))


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines from byte `start` on, each with the offset of its end."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        file.seek(start)
        at = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            at += len(line)
            yield at, line


def _apply(db: sqlite3.Connection, line: bytes) -> None:
    """Store a line in the table; skip lines of newer versions or from elsewhere."""
    try:
        read = json.loads(line)
        if read.get("op") == "goal":
            entry = {"goal": str(read["goal"])}
            values = (f"{_GOAL}{read['environment']}", float(read["at"]), float(read["at"]), str(read["environment"]))
            db.execute("INSERT OR REPLACE INTO experiments VALUES (?, ?, ?, ?, ?)", (*values, json.dumps(entry)))
        elif read.get("op") == "experiment":
            one = Experiment.model_validate(read)
            values = (one.id, one.at, one.updated_at, one.environment)
            db.execute("INSERT OR REPLACE INTO experiments VALUES (?, ?, ?, ?, ?)", (*values, one.model_dump_json()))
    except (ValueError, TypeError, KeyError, AttributeError, ValidationError):
        return
