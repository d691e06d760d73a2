"""Steps that ask a teacher for questions, or an environment for tasks and its solver for answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.trajectories.synthesis.conftest import items
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.trajectories.items import text_of
from toprope.trajectories.synthesis.model_steps import EnvironmentTasks, TeacherQuestions
from toprope.trajectories.synthesis.pipeline import SynthesisConfig, SynthesisPipeline, SynthesisResult

ODD = """
import pathlib
from toprope.sdk import Environment, Part, Task
from toprope.sdk.errors import InvalidRequest
class Odd(Environment):
    parts = {"exact": Part()}
    finite = True
    def tasks(self):
        for n in range(20):
            yield Task(f"task {n}", reference=str(n))
    def reset(self, task):
        if int(task.reference) % 4 == 1:
            raise InvalidRequest("this level is not there")
        self.is_open = True
        return task.prompt
    def solve(self, variant=0):
        if int(self.task.reference) % 4 == 3:
            raise KeyError("no solution")
        return self.task.reference
    def score(self):
        return {"exact": 1.0}
    def close(self):
        if getattr(self, "is_open", False):
            with pathlib.Path(__file__).with_suffix(".txt").open("a") as file:
                print(self.task.reference, file=file)
"""


class Asked:
    """Answers with the number of the request, and keeps the requests."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        self.prompts.append(messages[-1]["content"])
        return f"question {len(self.prompts)}"


def test_teacher_sees_each_example_once():
    teacher = Asked()
    pipeline = SynthesisPipeline(SynthesisConfig(target_size=30, dedup_threshold=None))
    asyncio.run(pipeline.add_step(TeacherQuestions(teacher)).run(items(["alpha", "beta", "gamma"])))
    assert len(teacher.prompts) == 27
    assert all(prompt.count(word) == 1 for prompt in teacher.prompts for word in ("alpha", "beta", "gamma"))


def test_tasks_that_fail_neither_stay_open_nor_end_the_others(tmp_path: Path):
    (tmp_path / "odd.py").write_text(ODD)

    async def work() -> tuple[SynthesisResult, set[str], list[str]]:
        link = await EnvironmentWorker.start(timeout=60)
        try:
            source = {"file": str(tmp_path / "odd.py"), "attribute": "Odd"}
            await link.call("open", timeout=60, source=source, knobs={})
            page = await link.tasks("train", 0, 20, timeout=60)
            numbers = {str(task.reference) for task in page.tasks}
            pipeline = SynthesisPipeline(SynthesisConfig(target_size=100, dedup_threshold=None))
            result = await pipeline.add_step(EnvironmentTasks(link, "odd")).run()
            return result, numbers, (tmp_path / "odd.txt").read_text().split()
        finally:
            await link.close()

    result, numbers, closed = asyncio.run(work())
    answered = {number for number in numbers if int(number) % 4 in (0, 2)}
    assert {text_of(item.action) for item in result.items} == answered and len(answered) > 3
    assert set(closed) == {number for number in numbers if int(number) % 4 != 1}
