"""Chooses the next training task: its environment, its number, and its curriculum level.

A restarted driver, and an attempt that continues a run, resume where they were: task numbers are stored in mixture.json
of the run's folder (see toprope.records.used_tasks), levels in curriculum.json.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.journal.groups import Outcome
from toprope.records.messages import ENV_CHECKPOINT, Leveled
from toprope.records.run.curriculum import Curricula, CurriculumState
from toprope.records.run.folder import read_json
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.metrics import last_row
from toprope.records.used_tasks import USED_TASKS_VERSION, ended_groups, used_tasks_file
from toprope.training.component.member import CrewMember
from toprope.training.rollouts.curriculum import CurriculumProgress, level_variant
from toprope.training.rollouts.difficulty import DifficultyFilter
from toprope.training.rollouts.environment_host import EnvironmentHost
from toprope.training.rollouts.group_sampler import GroupSampler, TaskRef
from toprope.training.rollouts.mixture_weights import MixtureEntry, MixtureScheduler
from toprope.training.trainer.checkpoints.checkpoint_folder import read_state

_SAVE_EVERY_S = 1.0


@dataclass(frozen=True)
class TaskChoice:
    """A training task to sample, and the label of its environment."""

    label: str
    task: TaskRef


class TaskSampler:
    """Chooses training tasks, and keeps the progress of mixture and curricula.

    Args:
        member: The driver's membership.
        hosts: The environments by label, the selected one first.
    """

    def __init__(self, member: CrewMember, hosts: Mapping[str, EnvironmentHost]) -> None:
        self._member, self._hosts = member, hosts
        config = member.spec.config
        self._deterministic = config.algorithm.deterministic
        self._is_mixture = len(hosts) > 1
        self._number, self._drivers = member.number, config.launcher.driver_count
        plans = [host.plan for host in hosts.values()]
        self._scheduler = MixtureScheduler(
            [MixtureEntry(plan.label, plan.weight, plan.min_share) for plan in plans],
            places=1 if self._deterministic else config.rollout.concurrency,
            seed=config.algorithm.seed + self._number - 1,
        )
        self._has_minimum = any(plan.min_share for plan in plans)
        self._begun: Counter[str] = Counter()
        """Tasks begun by this driver; drivers take turns in the numbers of tasks."""
        self._ended: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._saved_at = self._adjusted_at = float("-inf")
        self._adjusted_step = -1
        records = self._read_curricula() if any(plan.curriculum for plan in plans) else {}
        self.curricula = {
            plan.label: CurriculumProgress(plan.curriculum, records.get(plan.label))
            for plan in plans
            if plan.curriculum is not None
        }
        """Progress of the curricula, by label."""
        self._difficulty: DifficultyFilter | None = None
        if config.rollout.difficulty_filter:
            self._difficulty = DifficultyFilter(member.folder.path, config.algorithm.seed)
            if member.attempt > 1 or member.life:
                self._difficulty.restore()
        if self.curricula:
            self._save_curricula()

    def restore(self, accepted: int, *, is_resumed: bool) -> None:
        """Sets the task numbers to begin with.

        Args:
            accepted: Groups that earlier attempts and lives posted.
            is_resumed: True if there were earlier attempts or lives.
        """
        spec, shares = self._member.spec, self._scheduler.shares
        for label, share in shares.items():
            first = spec.first_tasks.get(label, spec.first_task * share)
            self._begun[label] = round(first + accepted * share) // self._drivers
        if is_resumed:
            try:
                state = read_json(self._path, USED_TASKS_VERSION)
                ended = Counter(ended_groups(state))
                self._scheduler.restore(state["mixer"])
                # A killed driver did not store its last groups; whose they were is known if there is one environment.
                self._begun = ended if self._is_mixture else self._begun | ended
            except (NotFound, Corrupt, AttributeError, KeyError, TypeError, ValueError):
                pass
        self._ended.update(self._begun)

    async def next(self) -> TaskChoice:
        """The next task; waits while every environment has as many groups in progress as it may."""
        self._adjust_shares()
        while (label := self._scheduler.choose()) is None:
            self._freed.clear()
            await self._freed.wait()
        index = self._begun[label] * self._drivers + self._number - 1
        self._begun[label] += 1
        curriculum = self.curricula.get(label)
        variant = level_variant(curriculum.next_level()) if curriculum is not None else ""
        return TaskChoice(label, TaskRef("train", index, variant))

    def filter_by_difficulty(self, label: str, sampler: GroupSampler) -> None:
        """Lets a sampler skip training tasks that taught nothing lately, if rollout.difficulty_filter asks for it."""
        if (difficulty := self._difficulty) is not None:

            def check(task: TaskRef, task_id: str) -> None:
                if task.split == "train":
                    difficulty.check(_key(label, task, task_id))

            sampler.check_task = check

    def note_difficulty(self, choice: TaskChoice, task_id: str, outcomes: Sequence[Outcome]) -> None:
        """Records how hard a sampled task was."""
        if self._difficulty is not None:
            self._difficulty.add(_key(choice.label, choice.task, task_id), outcomes)

    def finish(self, choice: TaskChoice, *, ended: bool, counts: bool = True) -> None:
        """Ends a group in progress.

        Args:
            choice: Its task.
            ended: False if it was cancelled, so that its task may be sampled again.
            counts: False if the environment's turn should be given back.
        """
        self._scheduler.finish(choice.label, counts=counts)
        self._freed.set()
        self._ended[choice.label] += ended
        if self._deterministic or time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Stores the progress, so that a later life or attempt, or a run that continues this one, goes on behind it."""
        self._saved_at = time.monotonic()
        state = {"version": USED_TASKS_VERSION, "ended": dict(self._ended), "mixer": self._scheduler.state()}
        _write_if_room(lambda: write_json(self._path, state))
        if self._difficulty is not None and self._number == 1:
            _write_if_room(self._difficulty.save)

    def add_measure(self, label: str, step: int, successes: int, tasks: int) -> None:
        """Records a measure of an environment's current level on validation tasks; reports the next level if it opens.

        Args:
            label: The environment.
            step: Policy version that was measured.
            successes: Tasks that were solved.
            tasks: Tasks that were sampled and count.
        """
        progress = self.curricula[label]
        moved = progress.add_measure(step, successes, tasks).moved
        self._save_curricula()
        if moved:
            knob, levels = progress.curriculum.knob, len(progress.curriculum.levels)
            value = progress.record.value
            self._member.report(Leveled(label, knob, progress.level, levels, value, successes, tasks, step))

    @property
    def _path(self) -> Path:
        return used_tasks_file(self._member.folder, self._number)

    def _adjust_shares(self) -> None:
        """Adjusts the schedule to the shares in the trainer's newest metrics."""
        now = time.monotonic()
        due = self._deterministic or now - self._adjusted_at >= _SAVE_EVERY_S
        if not (self._is_mixture and self._has_minimum and due):
            return
        self._adjusted_at = now
        row = last_row(self._member.folder.metrics)
        step = int(row.get("step") or 0)
        if step and step != self._adjusted_step:
            self._adjusted_step = step
            self._scheduler.adjust({label: row.get(f"environments/{label}/share") or 0.0 for label in self._hosts})

    def _read_curricula(self) -> dict[str, CurriculumState]:
        member = self._member
        if member.attempt == 1 and not member.life:
            return {}
        curricula = Curricula.read(member.folder)
        if curricula is None:
            return {}
        if member.life:
            return curricula.environments
        # A new attempt has the checkpoint's policy, so levels opened after it are closed again.
        # A trainer of one's own publishes at will, so the checkpoint's version need not be its step.
        checkpoint = os.environ.get(ENV_CHECKPOINT)
        version = _version_of(Path(checkpoint)) if checkpoint else 0
        return {label: record.at(version) for label, record in curricula.environments.items()}

    def _save_curricula(self) -> None:
        curricula = Curricula(environments={label: progress.record for label, progress in self.curricula.items()})
        _write_if_room(lambda: curricula.write(self._member.folder))


def _version_of(checkpoint: Path) -> int:
    """The policy version of a checkpoint; its step if the trainer has found it damaged and set it aside."""
    try:
        return read_state(checkpoint).policy_version
    except Corrupt:
        return int(checkpoint.name.removeprefix("step-"))


def _key(label: str, task: TaskRef, task_id: str) -> str:
    return f"{label}/{task.variant}/{task_id}"


def _write_if_room(write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"the progress of the environments could not be written: {error}", file=sys.stderr, flush=True)
