"""Tasks that carry no signal are sampled less often, come back, and are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_stand_ins import ScriptedPolicy
from tests.training.driver.test_mixture import Api, Member, hosted, produced
from toprope.analysis.findings.failed_groups import HARMLESS, SKIPPED
from toprope.records.journal.groups import Group, Outcome
from toprope.records.messages import Making
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.training.rollouts.difficulty import SOLVED, UNSOLVED, DifficultyFilter, TaskSkipped
from toprope.training.rollouts.environment_set import EnvironmentSet

FEW = '''
"""Say yes."""
from toprope.sdk import Environment, Part, Task


class Few(Environment):
    """Says yes."""

    parts = {"score": Part()}

    def tasks(self, split):
        for number in range(12 if split == "train" else 3):
            yield Task(f"{split} {number}")

    def score(self):
        return {"score": float(self.answer == "yes")}
'''


def test_tasks_without_signal_are_sampled_less_and_counted(tmp_path: Path) -> None:
    """Twelve words: four always solved, four never, four sometimes."""
    file = tmp_path / "few.py"
    file.write_text(FEW)
    config = Config()
    config.environment.name = "few"
    config.rollout.difficulty_filter = config.algorithm.deterministic = True
    config.rollout.group_size = 4
    spec = Specification(
        run_id="run-a", kind="train", created_at=0.0, toprope_version="0", config=config, policy_cache="",
        environment=EnvironmentSource(name="few", file=str(file), attribute="Few"),
    )  # fmt: skip

    def some(messages: list[dict[str, Any]], index: int) -> str:
        kind = int(messages[0]["content"].rpartition(" ")[2]) % 3
        return "yes" if kind == 0 or (kind == 1 and index % 2) else "no"

    async def work(environments: EnvironmentSet) -> tuple[list[Group], Making]:
        api = Api(60)
        await produced(member, environments, api)
        return api.groups, [report for report in member.reports if isinstance(report, Making)][-1]

    member = Member(spec, tmp_path)
    groups, told = hosted(member, ScriptedPolicy(some), work, train=1, validation=1, heldout=0)
    kinds = Counter(int(str(group.prompt).rpartition(" ")[2]) % 3 for group in groups)
    assert kinds[1] > kinds[0] + kinds[2], kinds
    assert min(kinds.values()) >= 2, "no task is given up for good"
    skipped = {why: count for why, count in told.given_up.items() if why in SKIPPED}
    assert set(skipped) == set(SKIPPED) == {SOLVED, UNSOLVED} and SKIPPED[0] in HARMLESS
    in_progress = told.begun - told.posted - told.posting - sum(told.given_up.values())
    assert 0 <= in_progress <= 1, "every group is accounted for"
    again = DifficultyFilter(tmp_path, 0)
    again.restore()
    hard = next(key for key, (reason, count) in again._streaks.items() if reason == UNSOLVED and count > 2)
    with pytest.raises(TaskSkipped, match="never solved"):
        for _ in range(40):
            again.check(hard)
    again.add(hard, [Outcome(1.0, success=True), Outcome(0.0)])
    for _ in range(40):
        again.check(hard)
