"""A resumed or continued run begins with tasks that were not used, whatever became of their groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.rollout_stand_ins import SAMPLING
from toprope.atomic import write_json
from toprope.records.journal.groups import Group, Outcome
from toprope.records.run.folder import RunFolder
from toprope.records.used_tasks import read_used_tasks
from toprope.settings.schema import Config
from toprope.settings.sections.environment import members_of
from toprope.training.driver.producer import GroupProducer
from toprope.training.inference.client import Turn
from toprope.training.rollouts.difficulty import SOLVED, TaskSkipped
from toprope.training.rollouts.group_sampler import TaskRef
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.task_sampler import TaskSampler, _version_of


def member_of(folder: Path, **spec: Any) -> Any:
    config = Config()
    config.environment.name, config.rollout.concurrency, config.rollout.queue_groups = "a", 2, 99

    async def hold() -> None: ...

    return SimpleNamespace(
        spec=SimpleNamespace(**{"config": config, "run_id": "r", "first_task": 0, "first_tasks": {}} | spec),
        folder=RunFolder(folder), attempt=1, life=0, number=1, report=lambda report: None, hold_async=hold,
    )  # fmt: skip


def hosts_of(member: Any) -> Any:
    plans = members_of(member.spec.config.environment)
    return {plan.label: SimpleNamespace(plan=plan, part_weights={}) for plan in plans}


class Half:
    """Samples and posts even tasks, skips odd ones, and hangs at task `last`."""

    def __init__(self, last: int) -> None:
        self.last, self.tasks, self.accepted, self.hangs = last, list[int](), 0, asyncio.Event()

    async def sample(self, task: TaskRef, size: int, sampling: Any) -> SampledGroup:
        if task.index >= self.last:
            self.hangs.set()
            await asyncio.Event().wait()
        self.tasks.append(task.index)
        if task.index % 2:
            raise TaskSkipped(SOLVED)
        turn = Turn([], [1], [-0.1], [(0, 1)], "stop")
        return SampledGroup("t", [], ["x"], [Outcome(1.0)], [[turn]], 0.1)

    async def counts(self) -> Any:
        return SimpleNamespace(accepted=self.accepted)

    async def post_group(self, group: Group) -> int:
        self.accepted += 1
        return 0


async def produce_until_it_hangs(member: Any, half: Half) -> None:
    hosts = hosts_of(member)
    environments: Any = SimpleNamespace(hosts=hosts, samplers={"a": half})
    api: Any = half
    task = asyncio.create_task(
        GroupProducer(member, environments, api, SAMPLING, None, TaskSampler(member, hosts)).run()
    )
    async with asyncio.timeout(20):
        await half.hangs.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_resumed_run_begins_after_skipped_tasks(tmp_path: Path) -> None:
    member = member_of(tmp_path)

    async def run() -> Half:
        half = Half(20)
        await produce_until_it_hangs(member, half)
        half.last, half.hangs = 30, asyncio.Event()
        member.attempt = 2
        await produce_until_it_hangs(member, half)
        return half

    half = asyncio.run(run())
    assert half.accepted == 15 and half.tasks == list(range(30)), "cancelled tasks are sampled, and none is twice"
    assert read_used_tasks(member.folder, 1) == {"a": 30} and not read_used_tasks(member.folder, 2)


def begun(member: Any, accepted: int = 0, *, is_resumed: bool = False) -> dict[str, int]:
    """The first task of each environment, as one group after the other is chosen."""
    tasks = TaskSampler(member, hosts_of(member))
    tasks.restore(accepted, is_resumed=is_resumed)
    firsts: dict[str, int] = {}

    async def choose() -> None:
        for _ in range(8):
            choice = await tasks.next()
            firsts.setdefault(choice.label, choice.task.index)
            tasks.finish(choice, ended=True)

    asyncio.run(choose())
    return firsts


def mixed(folder: Path, **spec: Any) -> Any:
    member = member_of(folder, **spec)
    section = member.spec.config.environment
    section.weight, section.mixture = 3.0, [{"name": "b"}]
    return member


def test_continued_mixture_begins_where_each_environment_ended(tmp_path: Path) -> None:
    assert begun(mixed(tmp_path, first_task=100, first_tasks={"a": 90, "b": 40})) == {"a": 90, "b": 40}
    assert begun(mixed(tmp_path, first_task=100)) == {"a": 75, "b": 25}, "by share if it is unknown"


@pytest.mark.parametrize("name", ["ended", "posted"])
def test_resumed_run_reads_progress_of_earlier_versions_too(tmp_path: Path, name: str) -> None:
    mixer = {"credit": {"a": 0, "b": 0}, "factors": {"a": 1, "b": 1}, "shares": {"a": 0.75, "b": 0.25}}
    stored = {"version": 1, name: {"a": 50, "b": 7}, "mixer": mixer}
    write_json(tmp_path / "mixture.json", stored)
    assert begun(mixed(tmp_path), 40, is_resumed=True) == {"a": 50, "b": 7}
    (tmp_path / "mixture.json").write_text("[]")
    assert begun(mixed(tmp_path), 40, is_resumed=True) == {"a": 30, "b": 10}


def test_killed_driver_loses_no_accepted_group(tmp_path: Path) -> None:
    mixer = {"credit": {"a": 0}, "factors": {"a": 1}, "shares": {"a": 1}}
    write_json(tmp_path / "mixture.json", {"version": 1, "ended": {"a": 5}, "mixer": mixer})
    assert begun(member_of(tmp_path, first_task=3), 9, is_resumed=True) == {"a": 12}


def test_levels_of_a_checkpoint_that_was_set_aside_are_those_of_its_step(tmp_path: Path) -> None:
    """The trainer renames a damaged checkpoint and goes on from the one before; the driver has its former name."""
    assert _version_of(tmp_path / "step-000050") == 50
