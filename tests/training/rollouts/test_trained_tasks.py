"""A run that begins with another run's weights evaluates on nothing that those were trained on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toprope.records.trained_tasks import TrainedTasks, content_id, read_trained
from toprope.records.worker_messages import TaskPage, TaskView
from toprope.training.rollouts.environment_host import EnvironmentHost
from toprope.training.rollouts.environment_set import EnvironmentSet
from toprope.training.trainer.checkpoints.checkpoint_folder import commit_checkpoint


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Worker:
    """Has thirty held-out tasks."""

    async def tasks(self, split: str, start: int, count: int, **_: Any) -> TaskPage:
        views = [TaskView(id=f"id{n}", messages=said(f"question {n}")) for n in range(start, min(start + count, 30))]
        return TaskPage(tasks=views, known=30, exhausted=True)


def host_of(trained: frozenset[str]) -> EnvironmentHost:
    host = EnvironmentHost.__new__(EnvironmentHost)
    host._trained, host._numbers, host.is_only = trained, {}, True
    host.plan = SimpleNamespace(section=SimpleNamespace(load_timeout_s=5.0), label="one")  # type: ignore[assignment]
    host._send = lambda report: None
    host.sizes, host.shares_tasks = {}, False
    return host


def evaluated(host: EnvironmentHost, count: int) -> list[int]:
    found = asyncio.run(host._find_untrained(Worker(), "heldout", count))  # type: ignore[arg-type]
    assert [int(task.id.removeprefix("id")) for task in found] == [
        host.number("heldout", place) for place in range(len(found))
    ]
    return [host.number("heldout", place) for place in range(len(found))]


def test_trained_tasks_are_left_out_of_evaluations(tmp_path):
    """The attack: fine-tune on held-out questions, and report accuracy on them as a run from those weights."""
    base, own = tmp_path / "base", tmp_path / "own"
    record = TrainedTasks(base, None)
    record.add("set/id3", said("under another template"))
    record.add("elsewhere", said("Question  5"))
    trained = TrainedTasks(own, base).inherited
    assert evaluated(host_of(trained), 6) == [0, 1, 2, 4, 6, 7]
    assert evaluated(host_of(trained), 100) == [n for n in range(30) if n not in (3, 5)]
    assert evaluated(host_of(frozenset()), 6) == [0, 1, 2, 3, 4, 5], "the control: without its lineage it sees them"


def test_evaluations_sample_the_tasks_that_were_kept():
    host = host_of(frozenset({"id0", "id1"}))
    asyncio.run(host._find_untrained(Worker(), "heldout", 3))  # type: ignore[arg-type]
    sampled = []

    class Sampler:
        async def sample(self, task: Any, size: int, sampling: Any) -> None:
            sampled.append(task.index)

    environments = EnvironmentSet.__new__(EnvironmentSet)
    environments.hosts, environments._order = {"one": host}, {}
    environments.samplers = {"one": Sampler()}  # type: ignore[dict-item]
    for index in range(3):
        asyncio.run(environments.sample("heldout", index, 1, None))  # type: ignore[arg-type]
    assert sampled == [2, 3, 4]


def test_a_record_passes_through_the_generations(tmp_path):
    TrainedTasks(tmp_path / "a", None).add("env/0123456789abcdef", said("one"))
    child = TrainedTasks(tmp_path / "b", tmp_path / "a")
    child.add("env/1123456789abcdef", said("two"))
    grandchild = TrainedTasks(tmp_path / "c", tmp_path / "b")
    assert grandchild.inherited == {
        *("0123456789abcdef", "1123456789abcdef"),
        *(content_id(said("one")), content_id(said("two"))),
    }
    again = TrainedTasks(tmp_path / "b", tmp_path / "a")
    assert again.inherited == read_trained(tmp_path / "a"), "a resumed run leaves out the same tasks as before"
    assert read_trained(tmp_path / "missing") == frozenset()


def test_record_is_synced_before_a_checkpoint_appears_and_not_for_each_group(tmp_path, monkeypatch):
    order = []
    real_fsync, real_rename = os.fsync, os.rename

    def note_fsync(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", lambda *names: (order.append("checkpoint"), real_rename(*names)))
    record = TrainedTasks(tmp_path, None)
    record.add("env/0123456789abcdef", said("one"))
    assert order == [] and len(read_trained(tmp_path)) == 2, "written, and the driver did not wait for the disk"
    commit_checkpoint(tmp_path / "checkpoints", 1, lambda aside: aside.mkdir(parents=True), keep=1)
    assert order.index("trained-tasks.txt") < order.index("checkpoint")


def test_each_driver_records_its_tasks_in_a_file_of_its_own(tmp_path: Path) -> None:
    for driver in (1, 2, 3):
        TrainedTasks(tmp_path, None, driver).add(f"task-{driver}", [{"role": "user", "content": f"Question {driver}?"}])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trained-tasks-2.txt", "trained-tasks-3.txt", "trained-tasks.txt",
    ]  # fmt: skip
    assert {"task-1", "task-2", "task-3"} <= read_trained(tmp_path)
