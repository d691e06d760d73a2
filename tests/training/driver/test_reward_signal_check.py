"""A run is refused if its reward never varies, and only then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toprope.errors import ComponentFailed
from toprope.records.messages import Renewed
from toprope.records.run.specification import EnvironmentSource
from toprope.records.worker_messages import Card
from toprope.settings.sections.environment import EnvironmentSection
from toprope.settings.sections.launcher import LauncherSection
from toprope.training.driver.reward_signal_check import require_reward_signal
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.restarting_worker import RestartingWorker

HEAD = """import os
from toprope.sdk import Environment, Task
class Mine(Environment):
    def tasks(self):
        for n in range(60): yield Task(f"Say {n}", reference=str(n))
"""


def tried(folder: Path, code: str, adapter: str | None = None, **section: Any) -> tuple[list[Any], int]:
    """Reports to the keeper, and the number of scored answers."""
    (folder / "mine.py").write_text(HEAD + code)
    reports: list[Any] = []
    cards: list[Card] = []
    asked: list[str] = []

    async def opened() -> EnvironmentWorker:
        link = await EnvironmentWorker.start()
        cards.append(await link.open({"file": str(folder / "mine.py"), "attribute": "Mine"}, timeout=60))
        call = link.call

        async def counted(op: str, **arguments: Any) -> Any:
            asked.append(op)
            return await call(op, **arguments)

        link.call = counted  # type: ignore[method-assign]
        return link

    async def run() -> None:
        launcher = LauncherSection(restarts=2, restart_backoff_s=0.01)
        async with asyncio.timeout(120), await RestartingWorker.start(opened, launcher, reports.append) as worker:
            plan = SimpleNamespace(section=EnvironmentSection(**section))
            host: Any = SimpleNamespace(
                worker=worker, plan=plan, card=cards[0], is_only=True, subject="The environment",
                name_error=lambda error: error, source=EnvironmentSource(name="a", adapter=adapter),
            )  # fmt: skip
            await require_reward_signal(host)
            assert (await worker.current()).alive

    asyncio.run(run())
    return reports, asked.count("score")


def test_sound_environment_needs_two_scores(tmp_path: Path) -> None:
    code = "    def score(self): return float(self.answer == self.task.reference)\n"
    assert tried(tmp_path, code) == ([], 2)


@pytest.mark.parametrize(
    "code",
    [
        "    def score(self): return 0.5\n",
        "    def score(self): return len(self.task.prompt) % 2\n",
        "    def score(self): raise ValueError('always')\n",
        "    def reset(self, task): raise OSError('no data')\n    def score(self): return 0.0\n",
    ],
)
def test_constant_reward_is_refused_without_unchecked_reason(tmp_path: Path, code: str) -> None:
    with pytest.raises(ComponentFailed, match="cannot teach anything") as refusal:
        tried(tmp_path, code)
    assert "environment.unchecked_reason" in refusal.value.hint and "check_environment" in refusal.value.hint
    assert "fix score()" in refusal.value.hint
    with pytest.raises(ComponentFailed) as refusal:
        tried(tmp_path, code, adapter="atropos")
    assert "fix score()" not in refusal.value.hint and "choose another" in refusal.value.hint
    tried(tmp_path, code, unchecked_reason="a control run")


def test_ranking_of_a_group_is_tried_as_a_group(tmp_path: Path) -> None:
    ranks = (
        "    def score_group(self, rollouts):\n"
        "        right = [one.answer == self.task.reference for one in rollouts]\n"
        "        return [float(mine and not all(right)) for mine in right]\n"
    )
    assert tried(tmp_path, ranks)[0] == []
    with pytest.raises(ComponentFailed, match="cannot teach anything"):
        tried(tmp_path, "    def score_group(self, rollouts): return [0.5 for _ in rollouts]\n")
    with pytest.raises(ComponentFailed, match="cannot teach anything"):
        tried(tmp_path, "    def score_group(self, rollouts): raise ValueError('always')\n")


def test_unknown_reference_is_not_refused(tmp_path: Path) -> None:
    unknown = "        for n in range(60): yield Task(f'Ask {n}')\n    def score(self): return 0.0\n"
    tried(tmp_path, "    def tasks(self):\n" + unknown)
    tried(tmp_path, "    max_turns = 5\n    def score(self): return 0.0\n    def solve(self, variant=0): return None\n")


def test_answer_that_ends_worker_is_skipped(tmp_path: Path) -> None:
    code = (
        "    def score(self):\n        if not self.answer: os._exit(3)\n"
        "        return float(self.answer == self.task.reference)\n"
    )
    reports, _ = tried(tmp_path, code)
    assert [type(report) for report in reports] == [Renewed]


def test_scores_may_take_as_long_as_the_environment_s_own_limits(tmp_path: Path) -> None:
    code = (
        "    call_s = 60.0\n    def score(self):\n        import time\n        time.sleep(1.0)\n"
        "        return float(self.answer == self.task.reference)\n"
    )
    assert tried(tmp_path, code, call_timeout_s=0.3) == ([], 2), "no worker was replaced"
