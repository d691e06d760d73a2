"""Diagnoses a run while it goes on: feeds its steps to `toprope.analysis.findings` and tells what the rules say.

Warnings and worse are events; the status holds everything that is open, notes as well, which nobody needs to be woken
for. An attempt that goes on begins with what the rows on disk taught, so that nothing is told twice.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from toprope.analysis.findings import Diagnosis
from toprope.analysis.findings.diagnosis import ranked, severity
from toprope.analysis.findings.failed_groups import FailedGroups
from toprope.analysis.findings.standstill import standstill
from toprope.records.messages import CountsReport, Evaluated, Making, Report, Stepped
from toprope.records.run.metrics import read_history
from toprope.records.run.status import Finding

if TYPE_CHECKING:
    from toprope.supervisor.watchers.watcher import RunControl

__all__ = ["DiagnosisWatcher"]


class DiagnosisWatcher:
    """The watcher of findings; see `toprope.supervisor.watchers`."""

    def __init__(self, hands: RunControl) -> None:
        self._hands, self._config = hands, hands.specification.config
        self._diagnosis = Diagnosis(self._config)
        self._stands: Finding | None = None
        self._failed_groups = FailedGroups()
        self._lost: Finding | None = None
        self._step = 0
        self._dropped: Counter[str] = Counter()
        """Groups dropped up to the last step, by reason."""
        self._counted = False
        before = hands.status().evaluations.get("before", {}).get("accuracy")
        self._accuracy: float | None = before
        if hands.status().attempt > 1:
            for row in read_history(hands.folder.metrics).rows:
                self._diagnosis.see(row)
                self._step = self._diagnosis.history.step
            self._show()

    def heard(self, component: str, report: Report) -> None:
        """See `Watcher.heard`."""
        match report:
            case Stepped():
                self._stepped(report)
            case CountsReport():
                self._count(report)
            case Making():
                self._made(report)
            case Evaluated() if report.label == "before":
                self._accuracy = report.summary.get("accuracy")
            case _:
                pass

    def looked(self, now: float) -> None:
        """See `Watcher.looked`: what rows and accounts do not show is another watcher's."""

    def _made(self, report: Making) -> None:
        """Tells of groups that come to nothing when that begins, when it gets worse, and when it is over."""
        now, told = self._failed_groups.take(report.begun, report.given_up, report.errors), self._lost
        if now is not None and (told is None or severity(now.level) > severity(told.level)):
            self._lost = now.model_copy(update={"step": self._step})
            self._tell([self._lost])
        elif now is None and told is not None:
            self._lost = None
            self._tell([told.model_copy(update={"level": "over", "next": "", "step": self._step})])

    def _stepped(self, report: Stepped) -> None:
        self._step = report.step
        told = self._diagnosis.see({"step": report.step} | report.values)
        self._counted = False
        if self._stands is not None:
            told.append(self._stands.model_copy(update={"level": "over", "next": "", "step": report.step}))
            self._stands = None
        self._tell(told)

    def _count(self, report: CountsReport) -> None:
        dropped = Counter({reason: int(count) for reason, count in report.counts.get("dropped", {}).items()})
        if not self._counted:  # the first account after a step is what further ones are held against
            self._dropped, self._counted = dropped, True
            return
        if self._stands is None:
            since = dropped - self._dropped
            self._stands = standstill(since, self._config, step=self._step, accuracy=self._accuracy)
            if self._stands is not None:
                self._tell([self._stands])

    def _tell(self, told: list[Finding]) -> None:
        for finding in told:
            if severity(finding.level) != 1 and not self._was_note(finding):
                finding = self._with_kinds(finding)
                self._hands.event("finding", **finding.model_dump(mode="json"))
        if told:
            self._show()

    def _was_note(self, finding: Finding) -> bool:
        """Whether something is over of which no event told."""
        known = [one for one in self._hands.status().findings if one.rule == finding.rule]
        return finding.level == "over" and all(one.level == "note" for one in known)

    def _show(self) -> None:
        others = [finding for finding in (self._stands, self._lost) if finding is not None]
        opened = [self._with_kinds(finding) for finding in self._diagnosis.open]
        self._hands.update(findings=ranked([*others, *opened]))

    def _with_kinds(self, finding: Finding) -> Finding:
        """Errors of the scorer with their kinds, which the trainer's rows do not tell."""
        kinds = self._failed_groups.kinds()
        if finding.rule != "scorer_errors" or not kinds:
            return finding
        most = ", ".join(f"{kind} ({count})" for kind, count in kinds)
        return finding.model_copy(
            update={"what": f"{finding.what} Most are {most}.", "observed": {**finding.observed, **dict(kinds)}}
        )
