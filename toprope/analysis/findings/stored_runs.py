"""Explain a run from its folder: the same causes for live, ended and stored runs.

Judging a thousand rows takes some 14 ms, so the explanation of an ended run is stored beside them, under a digest of
what it was made from: the code, the specification, the rows, and the findings and evaluations in the status.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import BaseModel

import toprope
from toprope.analysis.findings.causes import BUDGET, Explanation, explanation
from toprope.analysis.findings.diagnosis import Diagnosis
from toprope.analysis.statistics.accuracy_change import AccuracyChange, change_between, change_by_training
from toprope.atomic import read_plain, write_text
from toprope.errors import Corrupt, NotFound
from toprope.records.run.curriculum import Curricula
from toprope.records.run.folder import EVALUATION_VERSION, RunFolder, read_json
from toprope.records.run.metrics import read_history
from toprope.records.run.specification import Specification
from toprope.records.run.status import Finding, Status

_HARMLESS_AFTER_GAIN = frozenset({"far_from_preset", "learning_rate_low", "kl"})
"""Rules about missing progress, or about a change of the policy, which is what a run is for whose held-out accuracy
rose. Critical findings stay."""
_MOST_BYTES = 1 << 20


class _Stored(BaseModel):
    """explanation.json."""

    made_of: str
    explanation: Explanation


def explain_run(folder: RunFolder, specification: Specification, status: Status) -> Explanation:
    """Return what is wrong with a run, causes first; empty for kinds of runs without steps.

    That of an ended run is stored, if the folder can be written, and read the next time.

    Args:
        status: Its open findings count, also those of rules that do not read metrics.
    """
    if not specification.run_kind.trains:
        return explanation(status.findings, {})
    made_of = _made_of(folder, status) if status.ended_at is not None else None
    if made_of is not None:
        with suppress(OSError, ValueError):
            stored = _Stored.model_validate_json(read_plain(folder.explanation, _MOST_BYTES))
            if stored.made_of == made_of:
                return stored.explanation
    try:
        rows, curricula = read_history(folder.metrics).rows, Curricula.read(folder)
    except Corrupt:
        rows, curricula, made_of = [], None, None
    diagnosis = Diagnosis(
        specification.config, specification.beside_preset, unknown_task=bool(specification.unknown_task)
    )
    diagnosis.see_stored(rows, curricula)
    result = diagnosis.explain(status.findings, ended=status.ended)
    change = accuracy_change(folder, status)
    if change is not None:
        causes = [cause for cause in result.causes if _agrees(cause, change)]
        result = Explanation(causes, result.below, result.differs)
    if made_of is not None:
        with suppress(OSError, ValueError):  # another user's folder, a full disk, or values without JSON
            dump = _Stored(made_of=made_of, explanation=result).model_dump_json()
            result = _Stored.model_validate_json(dump).explanation
            write_text(folder.explanation, dump)
    return result


def _agrees(cause: Finding, change: AccuracyChange) -> bool:
    """Return False for a cause that the change of accuracy refutes."""
    if change.verdict == "rose":
        return cause.rule not in _HARMLESS_AFTER_GAIN or cause.level == "critical"
    # A policy that became worse has changed enough: more steps or a higher rate would continue the fall.
    return change.verdict != "fell" or not (cause.rule == "learning_rate_low" or BUDGET & cause.changes.keys())


def _made_of(folder: RunFolder, status: Status) -> str | None:
    """Return a digest of all that an ended run's explanation depends on; None if it must not be stored."""
    try:
        files = [
            (file_stat.st_size, file_stat.st_mtime_ns) for file_stat in (folder.spec.stat(), folder.metrics.stat())
        ]
        changed_ns = _code_changed_ns()
        findings_json = status.model_dump_json(include={"findings", "evaluations"})
    except (OSError, ValueError):
        return None
    if changed_ns is None:
        return None
    parts = (toprope.__version__, changed_ns, files, findings_json)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _code_changed_ns() -> int | None:
    """Return when a file of the code last changed; None if that was after this process loaded it, or none is there."""
    changed = max((path.stat().st_ctime_ns for path in Path(toprope.__file__).parent.rglob("*.py")), default=None)
    return changed if changed is not None and changed < psutil.Process().create_time() * 1e9 else None


def accuracy_change(folder: RunFolder, status: Status) -> AccuracyChange | None:
    """Return the change of a run's accuracy by training; None if it was not measured before and after.

    The summaries in the status, which lack results by task, decide where the evaluations' files cannot be read.
    """
    if not {"before", "after"} <= status.evaluations.keys():
        return None
    with suppress(NotFound, Corrupt, OSError, KeyError, TypeError, ValueError, AttributeError):
        labels = ("before", "after")
        return change_by_training({label: read_json(folder.evaluation(label), EVALUATION_VERSION) for label in labels})[
            0
        ]
    return change_between(status.evaluations["before"], status.evaluations["after"])
