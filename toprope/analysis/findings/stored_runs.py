"""Explain a run from its folder: the same causes for live, ended and stored runs."""

from __future__ import annotations

from toprope.analysis.findings.causes import Explanation, explanation
from toprope.analysis.findings.diagnosis import Diagnosis
from toprope.analysis.statistics.intervals import Proportion, rose, wilson
from toprope.errors import Corrupt
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_history
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status

_HARMLESS_AFTER_GAIN = frozenset({"far_from_preset", "learning_rate_low", "kl"})
"""Rules about missing progress, or about a change of the policy, which is what a run is for whose held-out accuracy
rose. Critical findings stay."""


def explain_run(folder: RunFolder, specification: Specification, status: Status) -> Explanation:
    """Return what is wrong with a run, causes first; empty for kinds of runs without steps.

    Args:
        status: Its open findings count, also those of rules that do not read metrics.
    """
    if not specification.run_kind.trains:
        return explanation(status.findings, {})
    try:
        rows = read_history(folder.metrics).rows
    except Corrupt:
        rows = []
    differs = specification.beside_preset
    diagnosis = Diagnosis(specification.config, differs=differs)
    for row in rows:
        diagnosis.see(row)
    found = diagnosis.explain(status.findings, ended=status.ended)
    if learned(status):
        kept = [cause for cause in found.causes if cause.rule not in _HARMLESS_AFTER_GAIN or cause.level == "critical"]
        found = Explanation(kept, found.below, found.differs)
    return found


def learned(status: Status) -> bool | None:
    """Return True if held-out accuracy rose by more than the intervals; None if it was not measured twice."""
    before, after = (_share(status, label) for label in ("before", "after"))
    return None if before is None or after is None else rose(before, after)


def _share(status: Status, label: str) -> Proportion | None:
    summary = status.evaluations.get(label) or {}
    accuracy, tasks = summary.get("accuracy"), summary.get("tasks")
    return None if accuracy is None or not tasks else wilson(accuracy * tasks, tasks)
