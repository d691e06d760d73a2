"""What the members of a crew say, and what it means for their run: who is ready, what is done, what is shown.

It knows nothing of deaths and ends; `restarts` and `course` do. What a member said holds until it is started again.
"""

from __future__ import annotations

import time

from toprope.records.messages import (
    Checked,
    Checkpointed,
    CountsReport,
    Evaluate,
    Evaluated,
    Failed,
    Finished,
    Leveled,
    Making,
    Progress,
    Ready,
    Renewed,
    Report,
    Stepped,
    Warned,
)
from toprope.records.run.specification import Specification
from toprope.supervisor.keeper.component import Component
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.making import GroupCounts
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.programs import members_of, optional_members_of

__all__ = ["ReportHandler"]

_AFTER = Evaluate("after")


class ReportHandler:
    """What has been said so far.

    Args:
        specification: The run's.
        life: Where it is shown.
        crew: Who is told of it.
        resumes: Whether the attempt goes on from a checkpoint.
    """

    def __init__(self, specification: Specification, life: StatusWriter, crew: Crew, *, resumes: bool) -> None:
        self._spec, self._life, self._crew, self._resumes = specification, life, crew, resumes
        self.ready: set[str] = set()
        """Members that serve now."""
        self.finished: set[str] = set()
        self.evaluated: set[str] = set()
        self.confessed: dict[str, Failed] = {}
        """Why members fail, in their own words."""
        self.unsaved = False
        """Whether the trainer has done a step that no checkpoint holds."""
        self.needed = frozenset(members_of(specification)) - optional_members_of(specification)
        self._once_ready: set[str] = set()
        self._held_back = ""
        self._account = GroupCounts(life)

    def was_ready(self, name: str) -> bool:
        """Whether this member served at any time of this attempt."""
        return name in self._once_ready

    @property
    def all_ready(self) -> bool:
        """Whether everybody serves whom the run needs."""
        return self.ready >= self.needed

    @property
    def done(self) -> bool:
        """Whether all was said that a complete run needs. The trainer's exit counts as well: see `Course`."""
        kind = self._spec.run_kind
        evaluated = kind.final_evaluation is None or kind.final_evaluation in self.evaluated
        return evaluated and self.finished.issuperset(kind.last_members)

    def forget(self, name: str) -> None:
        """The member ended and is started again: it has said nothing so far."""
        self.ready.discard(name)
        self.finished.discard(name)
        self.confessed.pop(name, None)
        if name == "trainer":
            self.unsaved = False
            self._life.fell_back()
        if name == "inference":
            self._held_back = ""
        self.ended(name)

    def ended(self, name: str) -> None:
        """The member ended, for whatever reason."""
        if name == "environment":
            self._account.close()

    def take(self, component: Component, report: Report, *, closing: bool) -> None:
        """Understands one report. While the run is being closed only what is to be remembered of it counts."""
        name, life = component.name, self._life
        match report:
            case Stepped():
                self.unsaved = True
                life.stepped(report, self._spec.config.budget.max_train_seconds)
                self._set_ready(component, closing)
            case Checkpointed():
                self.unsaved = False
                checkpoint = {"step": report.step, "path": report.path, "cursor": report.cursor}
                life.update(checkpoint=checkpoint | {"at": time.time()})
                life.event("checkpoint", **checkpoint)
            case CountsReport():
                life.update(counts=report.counts)
            case Making():
                self._account.take(report)
            case Evaluated():
                self._evaluated(report)
            case Leveled():
                life.levelled(report)
            case Warned():
                life.event("warning", what=f"{name}: {report.what}")
            case Failed():
                self.confessed[name] = report
            case _ if closing:
                return
            case Ready():
                self._served(component, report.address)
            case Checked():
                self._set_ready(component, closing)
            case Renewed():
                life.renewed(name)
                what = f"{report.what} is started again ({report.number} of {report.limit}): {report.reason}"
                said = {"reason": report.reason, "restart": report.number, "of": report.limit}
                life.event("restart", what=what, component=report.what, **said)
            case Progress():
                life.progressed(report)
            case Finished():
                self.finished.add(name)
                life.member(name, "finished")
                if name == "trainer" and "after" not in self.evaluated:
                    life.reach("evaluating")
                    self._crew.order("environment", _AFTER)

    def _evaluated(self, report: Evaluated) -> None:
        life = self._life
        self.evaluated.add(report.label)
        self._crew.settle("environment", Evaluate(report.label))
        if life.status.evaluations.get(report.label) == report.summary:
            return  # one that was started again says what it finds on disk
        life.update(evaluations={**life.status.evaluations, report.label: report.summary})
        life.event("evaluation", label=report.label, summary=report.summary)

    def _served(self, component: Component, address: str) -> None:
        name = component.name
        if name == "inference" and self._resumes and not self.was_ready("trainer"):
            # It has the policy's first weights until the trainer has published the checkpoint's.
            self._held_back = address
        elif address:
            self._crew.announce(name, address)
        self._set_ready(component, False)
        if name == "trainer" and self._held_back:
            self._crew.announce("inference", self._held_back)
            self._held_back = ""

    def _set_ready(self, component: Component, closing: bool) -> None:
        name = component.name
        if closing or name in self.ready:
            return
        self.ready.add(name)
        self._once_ready.add(name)
        self._life.member(name, "ready", pid=component.pid)
        if self._life.state == "validating" and self.needed & {"environment", "inference"} <= self._once_ready:
            self._life.to("starting")
            if not self._spec.run_kind.trains:
                self._life.to("evaluating")
