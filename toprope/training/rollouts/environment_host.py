"""One environment of a run as the driver has it: its worker, its card, its levels, and whoever plays it.

A run has one or several. Each has a worker of its own, in its own interpreter, and fails by its own name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from toprope.errors import ComponentFailed, InvalidValue, LockedField
from toprope.records.journal.groups import Outcome
from toprope.records.messages import ENV_FOLDER, Progress, Renewed, Report
from toprope.records.run.digests import joined, measuring
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.worker_messages import Card, TaskView
from toprope.sdk.errors import WorkerDied, WorkerError, WorkerFailure, WorkerTimeout
from toprope.sdk.worker.client import worker_environment
from toprope.settings.environment import MemberPlan, members_of
from toprope.settings.locks import hold_knobs
from toprope.training.driver.reward_signal_check import require_teaching
from toprope.training.inference.client import PolicyClient
from toprope.training.rollouts.endpoint_client import EndpointClient
from toprope.training.rollouts.env_managed_sampler import OwnLoopMaker
from toprope.training.rollouts.environment_worker import EnvironmentWorker
from toprope.training.rollouts.group_sampler import RolloutMaker
from toprope.training.rollouts.memory_watch import AT_ONCE, watch_memory
from toprope.training.rollouts.restarting_worker import Worker

__all__ = ["Hosted", "checked_of", "level_name", "measured_by", "plans_of"]


def plans_of(specification: Specification) -> list[tuple[MemberPlan, EnvironmentSource]]:
    """The environments of a run, the selected one first, each with where its worker finds it.

    Raises:
        InvalidValue: The specification does not name them all.
    """
    plans = members_of(specification.config.environment)
    sources = [specification.environment, *specification.mixture]
    if len(plans) != len(sources):
        raise InvalidValue(
            f"The specification names {len(sources)} environments, and its configuration {len(plans)}.",
            hint="Start the draft again.",
        )
    if not plans[0].label:
        name = specification.environment.name
        plans[0] = dataclasses.replace(plans[0], name=name, label=name)
    return list(zip(plans, sources, strict=True))


def level_name(number: int) -> str:
    """What a level of a curriculum is called in the worker."""
    return f"level-{number}"


class Hosted:
    """Make it by `Hosted.start`.

    Args:
        specification: The run's.
        plan: The environment's label, share and settings.
        source: Where a worker finds it.
        report: How the keeper is told.
        alone: Whether it is the run's only one: then nothing needs its name.
    """

    def __init__(
        self,
        specification: Specification,
        plan: MemberPlan,
        source: EnvironmentSource,
        report: Callable[[Report], None],
        *,
        alone: bool = True,
    ) -> None:
        self._config, self._locks = specification.config, specification.locks
        self.plan, self.source, self.alone = plan, source, alone
        self._selected = plan.label == specification.environment.name
        self._trains = specification.run_kind.samples
        self._tell = report
        self.loaded: dict[str, Any] = {}
        """Hashes of its sources and versions of its packages, as they were when its worker was started last."""
        self.sizes: dict[str, int] = {}
        """How many tasks of each split are there of those that are needed."""
        self.level_sizes: list[int] = []
        """How many validation tasks there are at each level of its curriculum, of those that are needed."""
        self.outcome: Outcome | None = None
        """What the reference answer to the first task was worth."""
        self._card: Card | None = None
        self._worker: Worker | None = None
        self._watch: asyncio.Task[None] | None = None
        """Holds the present worker to its memory; ends with it."""

    @property
    def label(self) -> str:
        return self.plan.label

    @property
    def card(self) -> Card:
        """The environment as its worker loaded it last."""
        assert self._card is not None, "it is started first"
        return self._card

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "it is started first"
        return self._worker

    @classmethod
    async def start(
        cls,
        specification: Specification,
        plan: MemberPlan,
        source: EnvironmentSource,
        report: Callable[[Report], None],
        *,
        alone: bool = True,
    ) -> Hosted:
        """Starts the worker and opens the environment in it.

        Raises:
            WorkerFailure: It does not start, or the environment does not load.
            InvalidValue, LockedField: The configuration does not fit the environment, or the owner's locks forbid it.
        """
        hosted = cls(specification, plan, source, report, alone=alone)
        hosted._worker = await Worker.start(hosted.open, specification.config.launcher, hosted._report)
        return hosted

    async def close(self) -> None:
        """Ends the worker."""
        if self._watch is not None:
            self._watch.cancel()
        if self._worker is not None:
            await self._worker.close()

    def maker(self, player: PolicyClient | EndpointClient) -> RolloutMaker:
        """Whoever plays this environment's tasks with `player`."""
        section = self.plan.section
        maker = (OwnLoopMaker if self.card.own_loop else RolloutMaker)(
            self.worker,
            player,
            multi_turn=self.card.max_turns > 1,
            call_timeout_s=section.call_timeout_s,
        )
        if isinstance(maker, OwnLoopMaker):
            maker.rollout_timeout_s = section.rollout_timeout_s
        return maker

    async def open(self) -> EnvironmentWorker:
        """A new worker with the environment and its levels open in it. Raises: see `start`."""
        loaded = measuring(self.source)
        section = self.plan.section
        # The keeper gave this process what the environment may have, keys that the owner named for it included; by the
        # run's folder whatever the environment starts is known as the run's.
        given = {
            name: value for name, value in os.environ.items() if name == ENV_FOLDER or not name.startswith("TOPROPE_")
        }
        if self._config.algorithm.deterministic:
            given.setdefault("PYTHONHASHSEED", "0")  # else sets of texts have another order in every process
        link = None
        try:
            link = await EnvironmentWorker.start(
                self.source.interpreter, env=worker_environment(given), stderr=_OwnLog(), timeout=section.load_timeout_s
            )
            await self._open_in(link)
        except BaseException as error:
            if link is not None:
                await link.close()
            raise self.named(error) from (error.__cause__ if self.alone else error)
        self.loaded = {"loaded": loaded, "versions": self.card.versions}
        if section.memory_mb:
            self._watch = asyncio.create_task(watch_memory(link, section.memory_mb))
        return link

    async def _open_in(self, link: EnvironmentWorker) -> None:
        section, timeout = self.plan.section, self.plan.section.load_timeout_s
        denied = section.network == "deny"
        if section.memory_mb or denied:
            await link.limit(timeout=timeout, memory_mb=round(AT_ONCE * section.memory_mb), network=not denied)
        curriculum = self.plan.curriculum
        knobs = dict(section.knobs)
        if curriculum is not None:
            knobs[curriculum.knob] = curriculum.levels[curriculum.measured]
        source = self.source.model_dump(include={"file", "attribute", "adapter", "target"}, exclude_none=True)
        rewards = [one.model_dump() for one in self.source.rewards]
        card = self._card = await link.open(
            source,
            timeout=timeout,
            knobs=knobs,
            reward_weights=section.reward_weights,
            max_turns=section.max_turns,
            seed=self._config.algorithm.seed,
            rewards=rewards,
        )
        if denied and card.own_loop:
            raise InvalidValue(
                "environment.network is deny, and this environment plays its rollouts itself: it needs the network to "
                "reach the policy.",
                hint="edit_config sets environment.network to allow.",
            )
        for name in section.reward_weights_end:
            if name not in card.parts:
                raise InvalidValue(
                    f"environment.reward_weights_end names {name!r}, which is no part of this environment's reward.",
                    hint=f"Parts: {', '.join(card.parts)}.",
                )
        if not self._selected:  # of the selected one they were held when it was frozen
            hold_knobs(card.knob_values, self._locks, self.label)
        if curriculum is None:
            return
        for number, value in enumerate(curriculum.levels):
            card = await link.vary(level_name(number), {**section.knobs, curriculum.knob: value}, timeout=timeout)
            hold_knobs(card.knob_values, self._locks, self.label)

    async def check(self, needed: Mapping[str, int], level: int | None = None) -> None:
        """Looks whether every split has tasks and an answer can be scored.

        Args:
            needed: How many tasks of each split are needed.
            level: The level at which training begins, where there are levels.

        Raises:
            ComponentFailed: A split has no task, or the reward of an environment to train on never varies.
            WorkerFailure: The environment fails.
        """
        link, section = await self.worker.link(), self.plan.section
        example: tuple[str, str, TaskView] | None = None
        try:
            await self._check_levels(link)
            for split, count in needed.items():
                if not count:
                    continue
                variant = level_name(level) if level is not None and split == "train" else ""
                found = await self._tasks(link, split, count, variant)
                self.sizes[split] = len(found)
                if not found:
                    raise ComponentFailed(
                        f"{self._subject} has no tasks in its {split} split.",
                        hint="Splits are made by content: an environment needs a few dozen distinct tasks at least.",
                    )
                example = example or (split, variant, found[0])
            # Any answer says whether the environment scores; the right one also says how high.
            if example is not None:
                split, variant, task = example
                answer = str(task.reference)
                self.outcome = await link.score(split, 0, answer, timeout=section.call_timeout_s, variant=variant)
            if self._trains:
                await require_teaching(self)
        except WorkerFailure as error:
            raise self.named(error) from (error.__cause__ if self.alone else error)

    async def _check_levels(self, link: EnvironmentWorker) -> None:
        if (curriculum := self.plan.curriculum) is None:
            return
        self.level_sizes = []
        for number, value in enumerate(curriculum.levels):
            for split, count in (("train", 1), ("validation", curriculum.window)):
                found = await self._tasks(link, split, count, level_name(number))
                if not found:
                    raise ComponentFailed(
                        f"{self._subject} has no tasks in its {split} split with {curriculum.knob} {value!r}.",
                        hint="Leave that level out of the curriculum.",
                    )
            self.level_sizes.append(len(found))

    async def _tasks(self, link: EnvironmentWorker, split: str, count: int, variant: str) -> list[TaskView]:
        """The first `count` tasks of a split, or as many as there are.

        They come in pieces that a slow environment can make within the time limit of a call: ten tasks have to be
        looked at to find one that is held out.
        """
        found: list[TaskView] = []
        piece = 4
        while len(found) < count:
            began = time.monotonic()
            page = await link.tasks(
                split,
                len(found),
                min(piece, count - len(found)),
                timeout=self.plan.section.load_timeout_s,
                variant=variant,
            )
            found += page.tasks
            if page.exhausted and len(found) >= page.known:
                break
            seconds = time.monotonic() - began
            piece = min(piece * 2, 1024) if seconds < 1 else max(1, piece // 2)
            if seconds >= 1:
                self._tell(Progress(f"making {split} tasks{self._of}", len(found), count))
        return found

    @property
    def parts(self) -> dict[str, float]:
        """What reward parts weigh at the beginning, by name."""
        return {name: part.weight for name, part in self.card.parts.items()}

    def named(self, error: BaseException) -> BaseException:
        """The error with this environment's name in it, where there are several."""
        if self.alone or str(error).startswith((f"{self.label}:", self._subject)):
            return error
        match error:
            case WorkerError():
                return WorkerError(error.kind, error.type, f"{self.label}: {error.message}", error.where)
            case WorkerDied():
                named: BaseException = WorkerDied(f"{self.label}: {error}", error.code, error.stderr)
            case WorkerTimeout():
                named = WorkerTimeout(f"{self.label}: {error}")
            case InvalidValue() | LockedField() | ComponentFailed():
                return type(error)(f"{self.label}: {error.message}", hint=error.hint)
            case _:
                return error
        if isinstance(error, WorkerDied | WorkerTimeout) and isinstance(named, WorkerDied | WorkerTimeout):
            named.at_work, named.environment = error.at_work, self.label
        return named

    @property
    def _subject(self) -> str:
        return "The environment" if self.alone else f"The environment {self.label}"

    @property
    def _of(self) -> str:
        return "" if self.alone else f" of {self.label}"

    def _report(self, report: Report) -> None:
        if isinstance(report, Renewed) and not self.alone:
            report = Renewed(f"{report.what} of {self.label}", report.reason, report.number, report.limit)
        self._tell(report)


def checked_of(hosts: Sequence[Hosted]) -> dict[str, Any]:
    """What was found of the environments: that of the selected one, and of each where there are several."""
    first, *others = hosts
    versions = dict(first.card.versions)
    for host in others:
        versions |= {f"{host.label}: {name}": version for name, version in host.card.versions.items()}
    found = {"tasks": first.sizes, "reference_outcome": _plain(first.outcome), "versions": versions}
    if others:
        found["environments"] = {
            host.label: {"tasks": host.sizes, "reference_outcome": _plain(host.outcome)} for host in hosts
        }
    return found


def _plain(outcome: Outcome | None) -> dict[str, Any] | None:
    return None if outcome is None else asdict(outcome)


def measured_by(hosts: Sequence[Hosted]) -> dict[str, Any]:
    """What a run measures with: hashes of its environments' sources as they were loaded, versions of their packages,
    and the hashes of now where they differ."""
    loaded = [host.loaded["loaded"] for host in hosts]
    now = [measuring(host.source) for host in hosts]
    found: dict[str, Any] = {"loaded": joined(loaded), "versions": checked_of(hosts)["versions"]}
    if len(hosts) > 1:
        found["environments"] = {host.label: host.loaded["loaded"]["environment"] for host in hosts}
    return found | ({"on_disk": joined(now)} if now != loaded else {})


class _OwnLog:
    """What the worker prints goes where the driver's own words go: the component's log."""

    def write(self, data: bytes, /) -> None:
        while data:
            data = data[os.write(2, data) :]
