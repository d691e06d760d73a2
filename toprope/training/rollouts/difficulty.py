"""Skips training tasks that taught nothing when they were sampled last: always solved, or never.

A task whose last k groups in a row carried no signal is sampled again with a probability of 2^-k, but at least 1/16,
because the policy changes. One group with signal makes it an ordinary task again. DAPO (Yu et al. 2025) samples such
groups and drops them; this saves the sampling. Environments that run their rollouts themselves are not filtered.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.journal.groups import Outcome
from toprope.records.run.folder import read_json

SOLVED, UNSOLVED = "skipped: always solved", "skipped: never solved"
"""Reasons for which a group is given up before anything was sampled."""
FILE = "difficulty.json"
_VERSION = 1
_LEAST = 1 / 16
_MOST_TASKS = 200_000


class TaskSkipped(Exception):
    """The task is not sampled this time; the argument is the reason."""


class DifficultyFilter:
    """The tasks that carried no signal lately.

    Args:
        folder: The run's folder, where the history is kept.
        seed: Makes the choices repeatable.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._path, self._seed = folder / FILE, seed
        self._streaks: dict[str, tuple[str, int]] = {}
        self._visits = 0

    def restore(self) -> None:
        """Continue with the history of earlier attempts and lives; without a sound one, begin anew."""
        try:
            state: Mapping[str, Any] = read_json(self._path, _VERSION)
            self._streaks = {str(key): (str(kind), int(count)) for key, (kind, count) in state["tasks"].items()}
            self._visits = int(state["visits"])
        except (NotFound, Corrupt, AttributeError, KeyError, TypeError, ValueError):
            self._streaks = {}

    def save(self) -> None:
        """Write the history. Raises: OSError."""
        tasks = {key: list(streak) for key, streak in self._streaks.items()}
        write_json(self._path, {"version": _VERSION, "visits": self._visits, "tasks": tasks})

    def check(self, key: str) -> None:
        """Decide about a task that is about to be sampled.

        Raises:
            TaskSkipped: It is not to be sampled this time.
        """
        reason, count = self._streaks.get(key, ("", 0))
        if not count:
            return
        self._visits += 1
        if random.Random(f"{self._seed}:{self._visits}:{key}").random() >= max(_LEAST, 0.5**count):
            raise TaskSkipped(reason)

    def add(self, key: str, outcomes: Sequence[Outcome]) -> None:
        """Record a sampled group. Groups with an error say nothing about their task."""
        if not outcomes or any(outcome.error for outcome in outcomes):
            return
        solved = sum(outcome.success for outcome in outcomes)
        equal = len({outcome.reward for outcome in outcomes}) == 1
        if not equal or 0 < solved < len(outcomes):
            self._streaks.pop(key, None)
            return
        reason = SOLVED if solved else UNSOLVED
        last_reason, count = self._streaks.pop(key, (reason, 0))
        self._streaks[key] = (reason, count + 1 if last_reason == reason else 1)
        if len(self._streaks) > _MOST_TASKS:
            self._streaks.pop(next(iter(self._streaks)))
