"""Runs as entries of lists, for every screen: titles, accuracies, the gravest finding, and a small curve."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from toprope.analysis.reports.headline import headline, share_done
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.metrics import read_history
from toprope.records.run.status import Status
from toprope.records.sweep_journal import read_standing
from toprope.text_format import clip, value
from toprope_tools.page.shapes import Gravest, Progress, RunItem, Share
from toprope_tools.status.snapshot import told_numbers

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

LEVELS = ("critical", "warning", "note")
"""The gravest first."""
_SPARK = 40
_SPARK_S = 10.0
"""Seconds between two readings of a live run's rows for its small curve."""
_SMALL_BYTES = 1 << 16
_MOST_KNOWN = 2000
_QUIET_FIELDS = ("budget.", "launcher.", "logging.", "algorithm.seed", "evaluation.")
"""Fields whose change says little about what a run tries."""
_T = TypeVar("_T")


class Remembered:
    """Values by key, kept while what they rest on is unchanged. Safe to use from several threads."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most, self._lock = most, threading.Lock()
        self._known: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    def get(self, key: Any, rests_on: Any, make: Callable[[], _T]) -> _T:
        """The value of a key, made anew if `rests_on` differs from last time."""
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] == rests_on:
                self._known.move_to_end(key)
                found: _T = known[1]
                return found
        made = make()
        with self._lock:
            self._known[key] = (rests_on, made)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return made


def stamp(path: os.PathLike[str]) -> tuple[int, int, int] | None:
    """Inode, time and size of a file, which change when it is written; None without a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Items:
    """Makes entries of runs.

    Args:
        owner: Show the newest numbers; otherwise those that check_status may tell.
    """

    def __init__(self, workshop: Workshop, *, owner: bool, remembered: Remembered) -> None:
        self._workshop, self._owner, self._remembered = workshop, owner, remembered

    def item(self, status: Status, *, spark: bool = True) -> RunItem:
        """A run as an entry."""
        found, environment = headline(status), clip(status.environment, 160)
        title = environment.rpartition("/")[2].replace("_", " ") or status.run_id
        return RunItem(
            run_id=status.run_id,
            kind=status.kind,
            title=title if status.kind == "train" else f"{status.kind}: {title}",
            detail=self._detail(status.run_id),
            environment=environment,
            state=status.state,
            live=not status.ended,
            created_at=status.created_at,
            started_at=status.started_at,
            ended_at=status.ended_at,
            accuracy=None if found is None else _share(found.accuracy, found.low, found.high, found.tasks),
            before=None if found is None else found.before,
            finding=_gravest(status),
            progress=self._progress(status),
            spark=self._spark(status) if spark else None,
        )

    def numbers(self, status: Status) -> Mapping[str, Any]:
        """The numbers that may be shown."""
        if self._owner or status.ended:
            return status.progress
        return told_numbers(self._workshop, status.run_id)[0]

    def _progress(self, status: Status) -> Progress:
        told = self.numbers(status)
        eta = told.get("eta_s") if status.state == "training" else None
        return Progress(
            step=_whole(told.get("step")),
            total_steps=_whole(told.get("total_steps")),
            reward=_real(told.get("reward")),
            success=_real(told.get("success")),
            eta_s=_real(eta),
            share=share_done(status.model_copy(update={"progress": dict(told)})),
            what=clip(str(told["what"]), 80) if "what" in told else None,
            done=_whole(told.get("done")),
            total=_whole(told.get("total")),
        )

    def _detail(self, run_id: str) -> str:
        return self._remembered.get(("detail", run_id), None, lambda: self._read_detail(run_id))

    def _read_detail(self, run_id: str) -> str:
        """The seed and the most telling fields that differ from the preset, in a few words."""
        try:
            data = read_json(RunFolder(self._workshop.home.runs / run_id).spec)
            seed = data["config"]["algorithm"]["seed"]
            beside = data.get("beside_preset") or {}
            told = [
                f"{name.rpartition('.')[2].replace('_', ' ')} {value(given[1])}"
                for name, given in beside.items()
                if not name.startswith(_QUIET_FIELDS)
            ]
            member = data.get("member")
        except (NotFound, Corrupt, KeyError, TypeError, IndexError, AttributeError):
            return ""
        words = [f"candidate {member.get('candidate')}"] if isinstance(member, dict) else [f"seed {seed}"]
        return clip(", ".join([*words, *told[:2]]), 80)

    def _spark(self, status: Status) -> list[float | None] | None:
        folder = RunFolder(self._workshop.home.runs / status.run_id)
        if status.run_kind.starts_runs:
            path = folder.path / "sweep.jsonl"
            return self._remembered.get(("spark", status.run_id), stamp(path), lambda: _scores(folder))
        if not status.run_kind.trains:
            return None
        column = "reward" if status.run_kind.samples else "loss"
        until = None if self._owner or status.ended else int(self.numbers(status).get("step") or 0)
        newest = stamp(folder.metrics) if status.ended else int(time.monotonic() / _SPARK_S)
        rests_on = (newest, until)
        return self._remembered.get(
            ("spark", status.run_id, self._owner), rests_on, lambda: _curve(folder, column, until)
        )


def _curve(folder: RunFolder, column: str, until: int | None) -> list[float | None] | None:
    try:
        rows = read_history(folder.metrics, 4 * _SPARK, whole_bytes=_SMALL_BYTES).rows
    except Corrupt:
        return None
    values = [_real(row.get(column)) for row in rows if until is None or row["step"] <= until]
    if not values:
        return None
    count = min(_SPARK, len(values))
    return [_mean(values[one * len(values) // count : (one + 1) * len(values) // count]) for one in range(count)]


def _scores(folder: RunFolder) -> list[float | None] | None:
    """The best score so far, after each candidate."""
    try:
        standing = read_standing(folder)
    except Corrupt:
        return None
    found: list[float | None] = []
    for one in list(standing.scores.values())[-_SPARK:]:
        last = found[-1] if found else None
        known = [score for score in (last, one.score) if score is not None]
        found.append(max(known, default=None))
    return found or None


def _mean(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return float(f"{sum(known) / len(known):.4g}") if known else None


def _share(accuracy: float, low: float, high: float, tasks: int) -> Share:
    return Share(accuracy, low, high, tasks) if tasks else Share(accuracy)


def _gravest(status: Status) -> Gravest | None:
    for level in LEVELS:
        for one in status.findings:
            if one.level == level:
                return Gravest(one.rule, level)
    return None


def _whole(given: object) -> int | None:
    return int(given) if isinstance(given, int | float) and not isinstance(given, bool) else None


def _real(given: object) -> float | None:
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None
