"""Tests of several models count what the test of one counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_stand_ins import SAMPLING, ScriptedPolicy
from tests.training.driver.test_mixture import hosted, member_of
from toprope.records.run.specification import ModelUnderTest, TestPlan
from toprope.sdk.worker.splits import SHARING_RULE
from toprope.training.evaluation.evaluator import Evaluator
from toprope.training.evaluation.model_comparison import compare_models
from toprope.training.rollouts.environment_set import EnvironmentSet


class Policy(ScriptedPolicy):
    async def close(self) -> None: ...


def test_environment_that_holds_nothing_out_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDS", "2")
    member, policy = member_of(tmp_path), Policy(lambda messages, index: messages[0]["content"].split()[1])
    for source in (member.spec.environment, *member.spec.mixture):
        source.split_rule = SHARING_RULE
    (tmp_path / "evaluations").mkdir()

    async def connect() -> Any:
        return policy

    async def work(environments: EnvironmentSet) -> Any:
        tasks = environments.count("validation", 4)
        evaluator = Evaluator(member.folder, environments, SAMPLING, concurrency=8, progress=lambda *said: None)
        models = await compare_models(
            TestPlan(tasks=4, group_size=2, models=[ModelUnderTest(name="base")]), tasks, SAMPLING,
            policy_name="tiny", connect_policy=connect, keys={}, purse=None,
            environments_with=lambda policy: environments, progress=lambda *said: None,
        )  # fmt: skip
        return tasks, await evaluator.test(tasks, 2), models

    tasks, alone, [model] = hosted(member, policy, work)
    assert tasks == 6 and len(model.examples) == 6
    assert (model.sampled["tasks"], model.sampled["split"]) == (alone["tasks"], alone["split"]) == (4, "validation")
    assert len(model.scores) == 4 and model.sampled["accuracy"] == alone["accuracy"] == 1.0
