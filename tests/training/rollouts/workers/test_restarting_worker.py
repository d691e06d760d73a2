"""A worker that ends over one task: the other tasks are sampled by the next worker; that task is given up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.records.messages import Renewed
from toprope.sdk.errors import WorkerDied, WorkerError
from toprope.settings.sections.launcher import LauncherSection
from toprope.training.inference.client import Answer, Sampling, SessionLost
from toprope.training.inference.sessions import Turn
from toprope.training.rollouts.group_sampler import GroupSampler, TaskRef
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.restarting_worker import RestartingWorker

ODD = '''
"""Some tasks end the worker."""
import os
import sys
import time
from toprope.sdk import Environment, Part, Task


class Odd(Environment):
    """Ends or hangs over what it is told to."""

    parts = {"fine": Part()}

    def tasks(self):
        for number in range(200):
            yield Task(f"{number}", reference=number)

    def score(self):
        if self.answer == "die":
            print("goodbye", file=sys.stderr, flush=True)
            os._exit(7)
        if self.answer == "hang":
            time.sleep(600)
        return {"fine": 1.0}
'''


class Says:
    """A policy that answers the n-th new task with the n-th word; it loses its session in the first `losses` calls."""

    def __init__(self, *words: str, losses: int = 0) -> None:
        self.words, self.losses, self.asked = list(words), losses, 0
        self.known: dict[str, str] = {}

    async def chat(self, messages: Any, sampling: Any, *, n: int = 1, session: str = "") -> list[Answer]:
        self.asked += 1
        if self.losses:
            self.losses -= 1
            raise SessionLost("a new server")
        task = messages[0]["content"]
        if task not in self.known:
            self.known[task] = self.words.pop(0) if self.words else "fine"
        word = self.known[task]
        return [Answer(word, False, Turn([1], [2], [-0.1], [(0, 1)], "stop"))] * n

    async def close_session(self, session: str) -> None:
        pass


def run_with_worker(
    tmp_path: Path,
    policy: Says,
    work: Callable[[GroupSampler, RestartingWorker], Awaitable[Any]],
    restarts: int,
    call_timeout_s: float = 60.0,
) -> tuple[Any, list[Any]]:
    (tmp_path / "odd.py").write_text(ODD)
    reports: list[Any] = []

    async def opened() -> EnvironmentWorker:
        link = await EnvironmentWorker.start()
        await link.call("open", source={"file": str(tmp_path / "odd.py"), "attribute": "Odd"})
        return link

    async def run() -> Any:
        section = LauncherSection(restarts=restarts, restart_backoff_s=0.01)
        async with asyncio.timeout(120), await RestartingWorker.start(opened, section, reports.append) as worker:
            sampler = GroupSampler(worker, policy, multi_turn=False, call_timeout_s=call_timeout_s)  # type: ignore[arg-type]
            return await work(sampler, worker)

    return asyncio.run(run()), reports


SAMPLING = Sampling(1.0, 1.0, 8)


async def all_of(sampler: GroupSampler, count: int, split: str = "train") -> list[Any]:
    work = (sampler.sample(TaskRef(split, number), 2, SAMPLING) for number in range(count))
    return await asyncio.gather(*work, return_exceptions=True)


def test_task_that_ends_worker_costs_only_its_own_group(tmp_path: Path) -> None:
    """Eight groups share a worker; one crashes it, one hangs in it."""
    policy = Says("fine", "die", "fine", "hang")
    made, reports = run_with_worker(
        tmp_path, policy, lambda sampler, _: all_of(sampler, 8), restarts=2, call_timeout_s=5
    )
    failed = [one for one in made if not isinstance(one, SampledGroup)]
    assert len(failed) == 2 and all(isinstance(one, WorkerError) for one in failed), made
    assert sorted(one.type for one in failed) == ["WorkerDied", "WorkerTimeout"]
    assert all(outcome.reward == 1.0 for one in made if isinstance(one, SampledGroup) for outcome in one.outcomes)
    assert [(one.what, one.number, one.limit) for one in reports if isinstance(one, Renewed)] == [
        ("worker", 1, 2),
        ("worker", 2, 2),
    ]


def test_killed_worker_loses_no_group(tmp_path: Path) -> None:
    async def work(sampler: GroupSampler, worker: RestartingWorker) -> list[Any]:
        os.kill((await worker.current()).pid, signal.SIGKILL)
        return await all_of(sampler, 3)

    made, reports = run_with_worker(tmp_path, Says(), work, restarts=1)
    assert all(isinstance(one, SampledGroup) for one in made), made
    assert len(reports) == 1 and "SIGKILL" in reports[0].reason


@pytest.mark.parametrize("restarts", [0, 1])
def test_used_up_restarts_raise_with_last_lines(tmp_path: Path, restarts: int) -> None:
    async def work(sampler: GroupSampler, worker: RestartingWorker) -> Any:
        for number in range(restarts):
            with pytest.raises(WorkerError):
                await sampler.sample(TaskRef("train", number), 2, SAMPLING)
        with pytest.raises(WorkerDied) as ended:
            await sampler.sample(TaskRef("train", 9), 2, SAMPLING)
        return ended.value

    error, reports = run_with_worker(tmp_path, Says("die", "die"), work, restarts=restarts)
    assert "exit code 7" in str(error) and "goodbye" in str(error)
    assert ("was started again once within 3600 s" in str(error)) == bool(restarts)
    assert len(reports) == restarts


def test_last_lines_of_sealed_worker_are_dropped(tmp_path: Path) -> None:
    async def work(sampler: GroupSampler, worker: RestartingWorker) -> Any:
        async with worker.sealed():
            made = await all_of(sampler, 3, "heldout")
            # The next worker is sealed too.
            assert (await worker.current()).sealed
        assert not (await worker.current()).sealed
        return made

    made, reports = run_with_worker(tmp_path, Says("die"), work, restarts=1)
    assert sum(isinstance(one, WorkerError) for one in made) == 1
    assert "goodbye" not in str(made)
    assert [one.reason for one in reports] == ["The worker ended with exit code 7."]


def test_lost_session_ends_training_group_but_repeats_evaluation(tmp_path: Path) -> None:
    async def work(sampler: GroupSampler, worker: RestartingWorker) -> Any:
        with pytest.raises(SessionLost):
            await sampler.sample(TaskRef("train", 0), 2, SAMPLING)
        return await sampler.sample(TaskRef("validation", 0), 2, SAMPLING)

    policy = Says(losses=3)
    made, _ = run_with_worker(tmp_path, policy, work, restarts=1)
    assert isinstance(made, SampledGroup) and policy.asked == 4
