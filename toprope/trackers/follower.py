"""Reads what is new in a run's folder and passes it to trackers, from where an earlier life or attempt left off.

    trackers.json     how far the run was logged, and what each tracker tells about itself

Rows that a later attempt repeats are logged again, as metrics.jsonl has them: the later one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toprope.analysis.reports.headline import headline
from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import EVALUATION_VERSION, TRACKERS_VERSION, RunFolder, open_record, read_json
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.records.run.tested_models import read_models
from toprope.records.sweep_journal import read_standing
from toprope.trackers import figures
from toprope.trackers.tracker import Tracker

_MOST_BYTES = 1 << 20
"""Bytes of metrics.jsonl per look, so that a long file is read in pieces."""
_STEP = "step-"
_OWN, _MODELS = "own", "models"


class RunFollower:
    """The news of one run.

    Args:
        folder: Its folder.
        specification: Its specification.
        trackers: Get everything that is new.
        keeps_record: Go on where trackers.json ends, and write it; otherwise begin anew and write nothing.
    """

    def __init__(
        self, folder: RunFolder, specification: Specification, trackers: list[Tracker], *, keeps_record: bool = True
    ) -> None:
        self._folder, self._spec, self._trackers = folder, specification, trackers
        self._keeps_record = keeps_record
        record = read_record(folder) if keeps_record else _unlogged()
        self._offset: int = record["metrics_bytes"]
        self._step: int = record["step"]
        self._logged: dict[str, Any] = record["logged"]
        self._earlier: dict[str, Any] = record["trackers"]

    def pass_on(self) -> bool:
        """Log what is new since the last call; returns whether there may be more at once.

        Raises:
            ComponentFailed: A tracker does not take it.
            TopropeError: A record of the run cannot be read.
        """
        before = (self._offset, dict(self._logged))
        has_more = self._pass_steps()
        if not has_more:  # an evaluation belongs after the steps before it
            self._pass_evaluations()
            if self._spec.run_kind.starts_runs:
                self._pass_candidates()
        if (self._offset, self._logged) != before:
            for tracker in self._trackers:  # the record says that they have it, also after a kill
                tracker.flush()
            self.write_record()
        return has_more

    def finish(self, ends_as: str = "") -> None:
        """Log the rest and the figures of the whole run, and close it at every tracker. Raises: see `pass_on`.

        Args:
            ends_as: The state in which a live run ends; empty: its status has it.
        """
        while self.pass_on():
            pass
        status = Status.read(self._folder)
        state = ends_as or status.state
        summary: dict[str, Any] = {"state": state, "attempts": status.attempt}
        if (measured := headline(status)) is not None:
            summary |= {"accuracy": measured.accuracy, "accuracy_split": measured.split}
            if measured.tasks:
                summary |= {"accuracy_low": measured.low, "accuracy_high": measured.high}
        for tracker in self._trackers:
            tracker.summarize(summary)
            tracker.finish(1 if state in ("failed", "lost") else 0)
        self.write_record()

    def write_record(self) -> None:
        """Write trackers.json, if this keeps one. Without room the next time writes it."""
        if not self._keeps_record:
            return
        record = {
            "version": TRACKERS_VERSION,
            "metrics_bytes": self._offset,
            "step": self._step,
            "logged": self._logged,
            "trackers": {
                **self._earlier,
                **{tracker.name: self._complete_record(tracker) for tracker in self._trackers},
            },
        }
        try:
            write_json(self._folder.path / "trackers.json", record)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def _complete_record(self, tracker: Tracker) -> dict[str, Any]:
        """The record of a tracker, with the folders of all attempts, the oldest first."""
        record, earlier = tracker.record, self._earlier.get(tracker.name, {}).get("folders", [])
        folder = record.get("folder")
        return {
            **record,
            "folders": [*(former for former in earlier if former != folder), *([folder] if folder else [])],
        }

    def _pass_steps(self) -> bool:
        lines, self._offset, has_more = _complete_lines(self._folder.metrics, self._offset)
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn by a full disk; the trainer writes it again
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                self._step = row["step"]
                self._log(figures.step_row(row))
        return has_more

    def _pass_evaluations(self) -> None:
        for path in sorted(self._folder.evaluations.glob("*.json"), key=lambda path: path.stat().st_mtime):
            stamp = path.stat().st_mtime_ns
            if self._logged.get(path.stem) == stamp:
                continue
            label, content = path.stem, read_json(path, EVALUATION_VERSION)
            for row in figures.evaluation_rows(label, content, self._step_of(label)):
                self._log(row)
            self._summarize(figures.evaluation_summary(label, content))
            self._logged[label] = stamp
        if self._spec.trainer is not None:
            self._pass_own()
        if self._spec.test is not None and not self._logged.get(_MODELS) and (models := read_models(self._folder)):
            for row in figures.model_rows(models):
                self._log(row)
            self._summarize(figures.model_summary(models))
            self._logged[_MODELS] = len(models)

    def _pass_own(self) -> None:
        """Log the evaluation of a custom trainer, which is in the run's status only."""
        try:
            values = Status.read(self._folder).evaluations.get(_OWN)
        except (NotFound, Corrupt):
            return
        if values and self._logged.get(_OWN) != values:
            row = figures.own_row(values, self._step)
            self._log(row)
            self._summarize({name: value for name, value in row.items() if name.startswith("own/")})
            self._logged[_OWN] = values

    def _pass_candidates(self) -> None:
        standing = read_standing(self._folder)
        done = int(self._logged.get("candidates", 0))
        best: float | None = None
        for number, scored in enumerate(standing.scores.values(), 1):
            if scored.score is not None and math.isfinite(scored.score):
                best = scored.score if best is None else max(best, scored.score)
            if number > done:
                self._log(figures.candidate_row(number, scored, standing, best))
        self._logged["candidates"] = len(standing.scores)
        summary = figures.sweep_summary(standing)
        if self._logged.get("summary") != summary:
            self._summarize(summary)
            self._logged["summary"] = summary

    def _step_of(self, label: str) -> int:
        if label.startswith(_STEP) and label.removeprefix(_STEP).isdigit():
            return int(label.removeprefix(_STEP))
        return 0 if label == "before" else self._step

    def _log(self, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(values)

    def _summarize(self, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.summarize(values)


def read_record(folder: RunFolder) -> dict[str, Any]:
    """The content of trackers.json; that of an unlogged run if the file is missing.

    Raises:
        Corrupt: It cannot be read; TooNew if a newer version wrote it.
    """
    record = _unlogged()
    with suppress(NotFound):
        record |= read_json(folder.path / "trackers.json", TRACKERS_VERSION)
    return record


def _unlogged() -> dict[str, Any]:
    """The record of a run of which nothing was logged."""
    return {"metrics_bytes": 0, "step": 0, "logged": {}, "trackers": {}}


def _complete_lines(path: Path, offset: int) -> tuple[list[bytes], int, bool]:
    """Complete lines from `offset` on, the offset after them, and whether there are more."""
    try:
        with open_record(path) as file:
            file.seek(offset)
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return [], offset, False
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(), offset + end, len(data) == _MOST_BYTES and end > 0
