"""Advice of findings: every edit is one that the run's algorithm reads and that edit_config takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analysis.findings.test_findings import config, healthy
from toprope.analysis.findings import diagnose
from toprope.analysis.findings.standstill import standstill
from toprope.records.run.status import Finding
from toprope.settings.schema import Config

NO_REWARDS: dict[str, Any] = {
    name: None
    for name in ("reward", "reward_std", "success", "zero", "wrong", "right", "other", "clip", "moved", "age", "newest")
}
"""Metrics that fine-tuning on demonstrations does not have."""


def found(made: Config, rows: int = 100, **series: Any) -> dict[str, Finding]:
    """Return the first finding of each rule in a run with these metrics."""
    first: dict[str, Finding] = {}
    for finding in diagnose(healthy(rows, **series), made):
        first.setdefault(finding.rule, finding)
    return first


def fine_tuning() -> Config:
    made = config(algorithm__name="sft")
    made.sft.learning_rate, made.optimizer.learning_rate = 3e-4, 1e-6
    return made


def test_fine_tuning_is_told_to_lower_its_own_rate() -> None:
    """It ignores section `optimizer`."""
    nan = found(fine_tuning(), **NO_REWARDS, nan=lambda row: row > 40)["nan"]
    assert nan.changes == {"sft.learning_rate": 1e-4, "sft.max_grad_norm": 0.5}


def test_gradients_of_fine_tuning_are_not_judged_by_rewards() -> None:
    assert "gradient_spikes" not in found(fine_tuning(), **NO_REWARDS, grad_norm=lambda row: 1.0 if row < 40 else 9.0)
    flat = {"reward": 0.2, "success": 0.2, "grad_norm": lambda row: 1.0 if row < 40 else 9.0}
    assert "gradient_spikes" in found(config(), **flat)


@pytest.mark.parametrize(
    ("limit", "context", "edit"),
    [
        (256, 4096, {"rollout.max_new_tokens": 512}),
        (256, 512, {"rollout.max_new_tokens": 512, "policy.max_context": 768}),
        (250, 512, {"rollout.max_new_tokens": 500, "policy.max_context": 762}),
    ],
)
def test_longer_answers_leave_room_for_prompts(limit: int, context: int, edit: dict[str, int]) -> None:
    made = config(rollout__max_new_tokens=limit, policy__max_context=context)
    assert found(made, cut=0.5)["truncated"].changes == edit
    made.algorithm.mask_truncated_completions = True
    stands = standstill({"empty": 200}, made)
    assert stands is not None and ("policy.max_context to" in stands.next) is ("policy.max_context" in edit)
    for name, value in edit.items():
        section, field = name.split(".")
        setattr(getattr(made, section), field, value)
    assert not made.conflicts()
