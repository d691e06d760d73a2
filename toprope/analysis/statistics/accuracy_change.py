"""Decide if accuracy rose or fell from one evaluation of a run to a later one.

Evaluations of the same tasks are compared task by task with the exact paired test (`sign_flip`), because intervals that
overlap do not show that nothing changed. Without results by task, the intervals decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from toprope.analysis.reports.headline import measured_share
from toprope.analysis.statistics.comparison import SIGNIFICANT, Answers, on_same_tasks
from toprope.analysis.statistics.intervals import Proportion
from toprope.analysis.statistics.sign_flip import sign_flip


class AccuracyChange(BaseModel):
    """The change of an accuracy from `before` to `after`."""

    verdict: Literal["rose", "fell", "none"]
    """`none`: neither a rise nor a fall is shown."""
    comparable: bool = True
    """False if different code measured before and after, as when it was edited before a resume."""
    p: float | None = None
    """p-value of the paired test; None if the intervals decided."""
    corrected: float | None = None
    """`p` corrected by Holm for the number of environments tested, which decides; None if no other was tested."""
    gained: int | None = None
    """Tasks solved more often after than before; None if the intervals decided."""
    lost: int | None = None

    @property
    def why(self) -> str:
        """The figures that decided, as a part of a sentence."""
        if not self.comparable:
            return "different code of environment or evaluator measured before and after"
        if self.p is None:
            return "the intervals overlap" if self.verdict == "none" else "the intervals do not overlap"
        corrected = "" if self.corrected is None else f", {self.corrected:.2g} among all environments"
        return f"{self.gained} tasks gained, {self.lost} lost, exact paired test p {self.p:.2g}{corrected}"

    def sentence(self) -> str:
        """Return the verdict and what decided, as a sentence."""
        if not self.comparable:
            return f"Accuracy before and after cannot be compared: {self.why}."
        if self.verdict == "none":
            return f"A rise of accuracy is not shown: {self.why}."
        return f"Accuracy {self.verdict}: {self.why}."

    def phrase(self) -> str:
        """Return the verdict and what decided, without a subject."""
        if not self.comparable:
            return f"not comparable ({self.why})"
        return f"{'a rise is not shown' if self.verdict == 'none' else self.verdict} ({self.why})"


def change_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> AccuracyChange | None:
    """Compare two measurements; None if one has no accuracy.

    Args:
        before, after: `accuracy` and `tasks`, and `by_task` if it was kept.
    """
    return _change(before, after, *(Answers.of(measured) for measured in (before, after)))


def change_by_training(evaluations: Mapping[str, Any]) -> tuple[AccuracyChange | None, dict[str, AccuracyChange]]:
    """Compare the evaluations before and after training: over all tasks, None if one has no accuracy, and by
    environment if there are several. They are not comparable if different code measured.

    Args:
        evaluations: Label -> content of evaluations/<label>.json.
    """
    pair = [evaluations.get(label) or {} for label in ("before", "after")]
    before, after = (evaluation.get("sampled") or {} for evaluation in pair)
    change, each = change_between(before, after), change_by_environment(before, after)
    loaded = [(evaluation.get("evaluator") or {}).get("loaded") for evaluation in pair]
    if change is None or None in loaded or loaded[0] == loaded[1]:
        return change, each
    unlike = AccuracyChange(verdict="none", comparable=False)
    return unlike, dict.fromkeys(each, unlike)


def change_by_environment(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, AccuracyChange]:
    """Compare each environment that both measurements have; their tasks begin with its label.

    Of many environments some seem to change by chance, so that paired tests are corrected for their number.
    """
    each_before, each_after = (measured.get("environments") or {} for measured in (before, after))
    answers_before, answers_after = (_answers_by_environment(measured) for measured in (before, after))
    changes = {
        label: _change(each_before[label], each_after[label], answers_before.get(label), answers_after.get(label))
        for label in each_before
        if label in each_after
    }
    return _corrected({label: change for label, change in changes.items() if change is not None})


def change_by_intervals(before: Proportion, after: Proportion) -> AccuracyChange:
    """Compare two shares by their intervals, which is stricter than a test of the difference."""
    if after.low > before.high:
        return AccuracyChange(verdict="rose")
    return AccuracyChange(verdict="fell" if after.high < before.low else "none")


def _change(
    before: Mapping[str, Any], after: Mapping[str, Any], answers_before: Answers | None, answers_after: Answers | None
) -> AccuracyChange | None:
    share_before, share_after = measured_share(before), measured_share(after)
    if share_before is None or share_after is None:
        return None
    paired = None
    if answers_before is not None and answers_after is not None:
        paired = on_same_tasks([answers_before, answers_after])
    if paired is None:
        return change_by_intervals(share_before, share_after)
    one, other = paired
    differences = [y * one.each - x * other.each for x, y in zip(one.wins, other.wins, strict=True)]
    p, total = sign_flip(differences), sum(differences)
    return AccuracyChange(
        verdict="none" if p > SIGNIFICANT else "rose" if total > 0 else "fell",
        p=p,
        gained=sum(difference > 0 for difference in differences),
        lost=sum(difference < 0 for difference in differences),
    )


def _corrected(changes: dict[str, AccuracyChange]) -> dict[str, AccuracyChange]:
    """Decide the paired tests by Holm's step-down correction."""
    tested = sorted((change.p, label) for label, change in changes.items() if change.p is not None)
    corrected = 0.0
    for rank, (p, label) in enumerate(tested if len(tested) > 1 else []):
        corrected = max(corrected, min(1.0, (len(tested) - rank) * p))
        verdict = "none" if corrected > SIGNIFICANT else changes[label].verdict
        changes[label] = changes[label].model_copy(update={"corrected": corrected, "verdict": verdict})
    return changes


def _answers_by_environment(measured: Mapping[str, Any]) -> dict[str, Answers]:
    answers, labels = Answers.of(measured), list(measured.get("environments") or {})
    if answers is None:
        return {}
    picked: dict[str, list[tuple[str, int]]] = {}
    for task, won in zip(answers.tasks, answers.wins, strict=True):
        label = max((label for label in labels if task.startswith(f"{label}/")), key=len, default=None)
        if label is not None:
            picked.setdefault(label, []).append((task, won))
    return {
        label: Answers(tuple(task for task, _ in pairs), tuple(won for _, won in pairs), answers.each)
        for label, pairs in picked.items()
    }
