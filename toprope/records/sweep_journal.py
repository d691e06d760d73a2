"""The journal of a sweep: its decisions in order, from which a killed conductor resumes.

    sweep.jsonl     one decision per line, appended and synced before the conductor acts on it

A decision in the journal is never made again: a strategy's answer, the run that measures a candidate, or its result. A
run's id follows from the sweep's id and the candidate's number, so a start that was recorded but not carried out is
carried out once by the next conductor. A last line that was torn by a kill does not count.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from toprope.atomic import append
from toprope.errors import Corrupt
from toprope.records.run.folder import REPAIR_HINT, RUN_ID, RunFolder, check_version, describe_misfits

SWEEP_VERSION = 1
_FILE = "sweep.jsonl"
_MEMBER = re.compile(r"-m(\d{2,4})$|-final$")
_OF_A_SWEEP = re.compile(r"^(?P<sweep>.+-\d{6}-\d{4}-[a-z0-9]{4})-(?:m(?P<number>\d{2,4})|final)$")


def member_id(sweep: str, number: int) -> str:
    """The id of the run that measures a sweep's candidate number `number`."""
    return f"{sweep}-m{number:02d}"


def final_id(sweep: str) -> str:
    """The id of the run that measures a sweep's winner on held-out tasks."""
    return f"{sweep}-final"


def sweep_of(run_id: str) -> tuple[str, int | None] | None:
    """The sweep of a run and its candidate's number (None: the measurement of the winner), both from the run's id.

    None for a run outside any sweep.
    """
    match = _OF_A_SWEEP.match(run_id)
    return (match["sweep"], int(match["number"]) if match["number"] else None) if match else None


def members_in(runs: Path, sweep: str) -> list[str]:
    """The ids of a sweep's runs in a folder of runs, in the order of their candidates."""
    if not RUN_ID.fullmatch(sweep):
        return []
    run_ids = [path.name for path in runs.glob(f"{sweep}-*") if _MEMBER.fullmatch(path.name[len(sweep) :])]
    return sorted(run_ids, key=lambda name: (name.endswith("-final"), len(name), name))


class _Line(BaseModel, frozen=True):
    version: int = SWEEP_VERSION


class Candidate(BaseModel, frozen=True):
    """One member of a population: `values` by field, `steps` of its own run, the `parent` that it was derived from, and
    the candidate whose weights and optimizer it `continues`."""

    id: str
    values: dict[str, Any]
    steps: int
    parent: str | None = None
    continues: str | None = None


class Generation(_Line):
    """The population of an epoch. Candidates that already have a score are not measured again."""

    what: Literal["generation"] = "generation"
    epoch: int
    candidates: list[Candidate]


class Started(_Line):
    """The run that will measure a candidate."""

    what: Literal["started"] = "started"
    candidate: str
    epoch: int
    run_id: str


class Measured(BaseModel, frozen=True):
    """The result of a candidate's run. `tasks`, `successes`, `accuracy`, `reward_mean` and `errors` are of the
    validation split, None if nothing was measured. `steps`: its optimizer steps; `groups`: training tasks that its
    whole line used."""

    accuracy: float | None = None
    tasks: int | None = None
    successes: int | None = None
    reward_mean: float | None = None
    errors: int | None = None
    steps: int = 0
    groups: int = 0
    state: str = ""


class Scored(_Line):
    """A candidate's score, higher is better; None: it has none, for the reason in `why`."""

    what: Literal["scored"] = "scored"
    candidate: str
    score: float | None
    measured: Measured = Measured()
    why: str = ""


class Survivors(_Line):
    """The candidates selected at the end of an epoch, the best first."""

    what: Literal["survivors"] = "survivors"
    epoch: int
    ids: list[str]


class Finalist(_Line):
    """The one measurement of the winner on held-out tasks; written before it, and again with its result."""

    what: Literal["final"] = "final"
    candidate: str
    run_id: str | None = None
    measured: Measured | None = None
    why: str = ""


Decision = Generation | Started | Scored | Survivors | Finalist
_decisions: TypeAdapter[Decision] = TypeAdapter(Decision)


@dataclass
class Standing:
    """The state of a sweep, as the sum of its decisions."""

    generations: list[Generation] = field(default_factory=list)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    """The run that measures it, by candidate."""
    born: dict[str, int] = field(default_factory=dict)
    """The first epoch, by candidate."""
    scores: dict[str, Scored] = field(default_factory=dict)
    survivors: dict[int, list[str]] = field(default_factory=dict)
    final: Finalist | None = None

    def take(self, decision: Decision) -> None:
        """Add one decision."""
        match decision:
            case Generation():
                self.generations.append(decision)
                for candidate in decision.candidates:
                    self.candidates.setdefault(candidate.id, candidate)
                    self.born.setdefault(candidate.id, decision.epoch)
            case Started():
                self.runs[decision.candidate] = decision.run_id
            case Scored():
                self.scores[decision.candidate] = decision
            case Survivors():
                self.survivors[decision.epoch] = decision.ids
            case Finalist():
                self.final = decision

    @property
    def best(self) -> Scored | None:
        """The highest score; among equal ones the candidate with more steps, then the earlier one."""
        return self.best_until(len(self.generations))

    def best_until(self, epoch: int) -> Scored | None:
        """The best among the candidates of an epoch and of the epochs before."""
        scored = [
            entry for entry in self.scores.values() if entry.score is not None and self.born[entry.candidate] <= epoch
        ]
        return max(scored, key=lambda entry: (entry.score, self.line_steps(entry.candidate)), default=None)

    @property
    def epochs_completed(self) -> int:
        """Epochs that ended with a selection."""
        return len(self.survivors)

    @property
    def steps(self) -> int:
        """Optimizer steps of all runs together."""
        return self.steps_until(len(self.generations))

    def steps_until(self, epoch: int) -> int:
        """Optimizer steps of the candidates of an epoch and of the epochs before."""
        return sum(entry.measured.steps for entry in self.scores.values() if self.born[entry.candidate] <= epoch)

    def ranked(self) -> list[str]:
        """Return the candidates by score, the best first and those without a score last."""
        order = {candidate: place for place, candidate in enumerate(self.candidates)}

        def place(candidate: str) -> tuple[float, int, int]:
            scored = self.scores.get(candidate)
            score = scored.score if scored and scored.score is not None else -math.inf
            return (-score, -self.line_steps(candidate), order[candidate])

        return sorted(self.candidates, key=place)

    def line_steps(self, candidate: str) -> int:
        """Optimizer steps behind a candidate's weights, including the candidates that it continues."""
        total, at = 0, self.candidates.get(candidate)
        while at is not None:
            scored = self.scores.get(at.id)
            total += scored.measured.steps if scored else 0
            at = self.candidates.get(at.continues) if at.continues else None
        return total


class SweepLog:
    """The journal of a sweep, for its only writer."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / _FILE
        self.standing = Standing()
        self._cut_torn()
        for decision in _read(self._path):
            self.standing.take(decision)

    def append(self, decision: Decision) -> None:
        """Record a decision; it holds when this returns.

        Raises:
            OSError: It was not recorded and does not hold.
        """
        append(self._path, decision.model_dump_json().encode() + b"\n")
        self.standing.take(decision)

    def _cut_torn(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        if data and not data.endswith(b"\n"):
            os.truncate(self._path, data.rfind(b"\n") + 1)


def read_standing(folder: RunFolder) -> Standing:
    """The state of a sweep, for readers; empty if it has not begun.

    Raises:
        Corrupt: The journal cannot be read; TooNew if a newer version wrote it.
    """
    standing = Standing()
    for decision in _read(folder.path / _FILE):
        standing.take(decision)
    return standing


def _read(path: Path) -> Iterator[Decision]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            value = json.loads(line)
            check_version(path, value, SWEEP_VERSION)
            yield _decisions.validate_python(value)
        except ValidationError as error:
            raise Corrupt(
                f"{path}, line {number} is not a sweep decision: {describe_misfits(error)}.", hint=REPAIR_HINT
            ) from None
        except ValueError as error:
            raise Corrupt(f"{path}, line {number} is not a sweep decision: {error}.", hint=REPAIR_HINT) from None
