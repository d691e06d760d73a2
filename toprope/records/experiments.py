"""The ledger of experiments: hypotheses, their runs, outcomes and decisions.

It is `ledger.jsonl` in the home, which people can read: every change appends a line, and nothing replaces the file.
Readers read all of it; a thousand entries take milliseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from filelock import FileLock
from pydantic import BaseModel

from toprope.atomic import append, open_plain
from toprope.errors import NotFound, NotPossibleNow, shown
from toprope.text_format import random_id

Decision = Literal["keep", "discard", "repeat", "undecided"]
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
        accuracies = [figures.accuracy for figures in self.figures.values() if figures.accuracy is not None]
        return sum(accuracies) / len(accuracies) if accuracies else None


class Ledger:
    """The ledger of one home.

    Args:
        path: ledger.jsonl.

    Raises (every method): NotPossibleNow if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def amending(self) -> Iterator[None]:
        """Hold the lock under which an entry is read and stored again, so that no amendment is lost.

        Raises:
            NotPossibleNow: Another process holds it for too long, or its file cannot be created.
        """
        lock = FileLock(f"{self.path}.lock", timeout=_LOCK_WITHIN_S, mode=0o600)
        try:
            acquired = lock.acquire()
        except OSError as error:
            raise NotPossibleNow(f"{lock.lock_file} cannot be locked: {error}.", hint="Call again.") from None
        with acquired:
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
        entries = self._read()[0]
        while (free_id := f"exp-{random_id(4)}") in entries:
            pass
        return free_id

    def get(self, experiment_id: str) -> Experiment:
        """An entry.

        Raises:
            NotFound: No entry has that id; the message names the latest.
        """
        entries = self._read()[0]
        if experiment_id not in entries:
            latest = [entry.id for entry in _newest_first(entries)[:5]]
            hint = f"The latest: {', '.join(latest)}." if latest else "There are none yet; omit experiment_id."
            raise NotFound(f"There is no experiment {shown(experiment_id)}.", hint=hint)
        return entries[experiment_id]

    def entries(self, environment: str | None = None, limit: int = 1000) -> list[Experiment]:
        """Entries, the newest first."""
        newest_first = _newest_first(self._read()[0])
        return [entry for entry in newest_first if environment in (None, entry.environment)][:limit]

    def goals(self) -> dict[str, str]:
        """Goals by environment, the one that was set last at the end."""
        return self._read()[1]

    def _read(self) -> tuple[dict[str, Experiment], dict[str, str]]:
        """Entries by id and goals by environment, without lines that are torn, of newer versions or from elsewhere."""
        entries: dict[str, Experiment] = {}
        goals: dict[str, str] = {}
        try:
            file = open_plain(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return entries, goals
        except OSError as error:
            raise NotPossibleNow(
                f"{self.path} cannot be read: {error.strerror or error}.", hint="Check its permissions."
            ) from None
        with file:
            for line in file:
                try:
                    record = msgspec.json.decode(line)  # a quarter of the time of json.loads
                    if record["op"] == "experiment":
                        entry = Experiment.model_validate(record)
                        entries[entry.id] = entry
                    elif record["op"] == "goal":
                        environment = str(record["environment"])
                        goals.pop(environment, None)
                        goals[environment] = str(record["goal"])
                except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError):
                    continue
        return entries, goals

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            append(self.path, data)
        except OSError as error:
            raise NotPossibleNow(
                f"{self.path} cannot be written: {error.strerror or error}.", hint="Check the room on that disk."
            ) from None


def _newest_first(entries: dict[str, Experiment]) -> list[Experiment]:
    return sorted(entries.values(), key=lambda entry: (-entry.at, entry.id))
