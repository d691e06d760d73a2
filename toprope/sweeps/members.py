"""Starts, resumes and reads the runs of one sweep, within the owner's limits as any other run.

A member follows from the sweep's specification and the decisions in its journal alone, so that a conductor that takes
over after a crash creates the same members. Held-out tasks are for the winner's last run only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.errors import NotFound
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import last_row
from toprope.records.run.specification import Specification, SweepMember, TestPlan, training_plan
from toprope.records.run.status import Status
from toprope.records.sweep_journal import Candidate, Measured, Standing, final_id, member_id
from toprope.records.used_tasks import read_used_tasks
from toprope.settings.changes import apply_changes
from toprope.settings.owner import Home
from toprope.settings.sections.environment import RUN
from toprope.sweeps.planning import SAMPLING
from toprope.workbench.launch import open_runs
from toprope.workbench.launch.accepted_code import require_unchanged
from toprope.workbench.launch.budgets.sweep_budget import draft_of_sweep
from toprope.workbench.launch.freeze import freeze_drafts
from toprope.workbench.launch.lineage import base_of
from toprope.workbench.launch.start import RunStarter

_HOSTED_AT_ONCE = 4
"""Runs at once whose computing is done at a service."""
_HOPELESS = frozenset(
    {
        "all_wrong",
        "collapse",
        "constant_reward",
        "entropy_gone",
        "learning_rate_high",
        "nan",
        "scorer_errors",
        "scorer_ignores_answers",
    }
)
"""Findings that further steps never healed once they were critical."""


def hopeless_reason(status: Status) -> str:
    """Return the critical finding that makes further training of a member pointless; empty if there is none."""
    if status.state != "training":
        return ""
    for finding in status.findings:
        if finding.level == "critical" and finding.rule in _HOPELESS:
            return f"{finding.rule}: {finding.what}"
    return ""


class SweepMembers:
    """The runs of one sweep.

    Args:
        sweep: The sweep's specification.
    """

    def __init__(self, home: Home, sweep: Specification) -> None:
        assert sweep.sweep is not None
        self._home, self._sweep, self._plan = home, sweep, sweep.sweep
        self.runs = open_runs.open_runs(home)
        self._starter = RunStarter(home, self.runs)

    def parallel_runs(self) -> int:
        """Return the number of members to start at the same time: as many as this machine has room for, or all that
        wait in a cluster's queue."""
        launcher, machine = self._sweep.config.launcher, self.runs.machine()
        if self._sweep.config.is_hosted:
            return _HOSTED_AT_ONCE
        if launcher.kind != "local":
            return self._plan.population
        trains = self._plan.evaluate == "train"
        processes = (launcher.num_processes if trains else 0) + 1
        if machine.gpus and launcher.device != "cpu":
            return max(1, len(machine.gpus) // max(1, processes - 1 + launcher.inference_gpus))
        return max(1, machine.threads // (launcher.threads * processes))

    def run_id(self, candidate: Candidate) -> str:
        """Return the id of the run that measures a candidate."""
        return member_id(self._sweep.run_id, int(candidate.id.removeprefix("c")))

    def exists(self, run_id: str) -> bool:
        """True if a run was started."""
        return (self.runs.path / run_id).is_dir()

    def start(self, candidate: Candidate, epoch: int, standing: Standing) -> None:
        """Start the run that measures a candidate, unless it was started before.

        Args:
            epoch: The epoch that it belongs to, from 1.
            standing: The decisions so far.

        Raises:
            CodeChanged: The environment's code is other than what the sweep was confirmed with.
            NoRoomWithin: The owner's limits leave no room.
            TopropeError: The candidate's configuration cannot run.
        """
        if self.exists(run_id := self.run_id(candidate)):
            return
        config, changes, base, first_task = self._sweep.config, dict(candidate.values), None, 0
        first_tasks: dict[str, int] = {}
        locks = self._home.locks(self._sweep.preset)
        if self._plan.evaluate == "train":
            changes["budget.steps"] = candidate.steps
            warmup = 0 if candidate.continues else min(config.optimizer.warmup_steps, candidate.steps)
            if "optimizer.warmup_steps" not in changes and locks.refusal("optimizer.warmup_steps", warmup) is None:
                changes["optimizer.warmup_steps"] = warmup
        if candidate.continues:
            base = base_of(f"{RUN}{standing.runs[candidate.continues]}", self._home.runs)
            first_task = standing.scores[candidate.continues].measured.groups
            continued = RunFolder(self.runs.path / standing.runs[candidate.continues])
            first_tasks = dict(read_used_tasks(continued, config.launcher.driver_count))
        member = SweepMember(
            sweep=self._sweep.run_id,
            candidate=candidate.id,
            epoch=epoch,
            parent=candidate.parent,
            continues=base[0] if base else None,
            first_task=first_task,
            first_tasks=first_tasks,
            sampling=self._sampling(),
        )
        evaluation = config.evaluation
        test = None
        if self._plan.evaluate == "test":
            test = TestPlan(tasks=evaluation.validation_tasks, group_size=config.rollout.group_size)
        self._launch(run_id, changes, member, test, base)

    def start_final(self, candidate: Candidate, standing: Standing) -> None:
        """Start the run that measures the winner on held-out tasks, unless it was started before.

        Raises:
            CodeChanged, NoRoomWithin, TopropeError: See `start`.
        """
        run_id = final_id(self._sweep.run_id)
        if self.exists(run_id):
            return
        member = SweepMember(
            sweep=self._sweep.run_id,
            candidate=candidate.id,
            epoch=self._plan.epochs,
            final=True,
            sampling=self._sampling(),
        )
        base = None
        if self._plan.evaluate == "train":
            base = base_of(f"{RUN}{standing.runs[candidate.id]}", self._home.runs)
        test = TestPlan(tasks=self._sweep.config.evaluation.heldout_tasks, group_size=1, heldout=True)
        self._launch(run_id, candidate.values, member, test, base)

    def _sampling(self) -> dict[str, Any]:
        """Return the settings of sampling that measure every candidate; those of the draft, if candidates train."""
        trains = self._plan.evaluate == "train"
        return self._sweep.config.rollout.model_dump(mode="json", include=set(SAMPLING)) if trains else {}

    def was_interrupted(self, run_id: str) -> bool:
        """True if a run exists that was told to stop, or was lost in a way for which it has no policy of its own.

        A conductor that is killed while it starts a run, or waits for a cluster, leaves one that never had a crew;
        tests do not resume by themselves.
        """
        if not self.exists(run_id):
            return False
        status = self.status(run_id)
        if status.state in ("lost", "failed") and self.is_over(status) and not status.crew:
            return True
        if status.state == "lost" and self.is_over(status):
            return self._sweep.config.launcher.resume_lost != "never" and status.run_kind.progress_event is None
        return status.state in ("stopping", "stopped")

    def resume(self, run_id: str) -> None:
        """Resume a run that was interrupted, from its last checkpoint.

        Raises:
            CodeChanged, NoRoomWithin: See `start`.
            TopropeError: The run cannot be resumed.
        """
        require_unchanged(self._sweep)
        open_runs.resume_run(self._home, self.runs, run_id)

    def _launch(
        self,
        run_id: str,
        changes: Mapping[str, Any],
        member: SweepMember,
        test: TestPlan | None,
        base: tuple[str, str] | None,
    ) -> None:
        sweep = self._sweep
        require_unchanged(sweep)
        config, _ = apply_changes(sweep.config, changes, self._plan.knobs)
        plan = test or training_plan(config)
        [specification] = freeze_drafts(
            self._home, [draft_of_sweep(sweep, config)], plan, base=base, split_rule=sweep.environment.split_rule
        )
        self._starter.start_frozen([specification.model_copy(update={"run_id": run_id, "member": member})])

    def status(self, run_id: str) -> Status:
        """Return the status of a member. A lost member resumes by itself if its own settings say so."""
        return self.runs.status(run_id)

    def is_over(self, status: Status) -> bool:
        """True if a member has ended and will not resume by itself."""
        return status.is_over and not status.goes_on

    def read_result(self, status: Status) -> Measured:
        """Return the measurements of a member that is over."""
        folder = RunFolder(self.runs.path / status.run_id)
        summary = status.evaluations.get("after") or status.evaluations.get("test") or {}
        specification = Specification.read(folder)
        used = read_used_tasks(folder, specification.config.launcher.driver_count)
        try:
            row = last_row(folder.metrics) or {}
        except (NotFound, OSError):
            row = {}
        return Measured(
            accuracy=summary.get("accuracy"),
            tasks=summary.get("tasks"),
            successes=summary.get("successes"),
            reward_mean=summary.get("reward_mean"),
            errors=summary.get("errors"),
            steps=int(row.get("step") or 0),
            groups=max(specification.first_task + int(status.counts.get("accepted") or 0), used.total()),
            state=status.state,
        )
