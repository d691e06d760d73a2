"""Step metrics beside TRL's: drift since sampling, time, and groups without signal."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.trainer_stand_ins import PreparedGroups, rollout_group, small_config
from toprope.records.journal.groups import Group, Outcome
from toprope.training.trainer.batch_source import BatchSource, TrainingRow, build_rows
from toprope.training.trainer.collate import RowTensors, collate
from toprope.training.trainer.step_metrics import PolicyDrift, StepTimer


def passed(delta: list[list[float]], age: list[int], mask: list[list[int]]) -> tuple[torch.Tensor, RowTensors]:
    sampled = torch.full((len(delta), len(delta[0])), -1.5)
    shown = torch.tensor(mask).bool()
    known = torch.ones(len(delta), dtype=torch.bool)
    batch = RowTensors(shown, sampled, torch.zeros(len(delta), 1), torch.tensor(age), known, float(shown.sum()))
    return sampled + torch.tensor(delta), batch


def test_policy_drift_is_split_by_version_age() -> None:
    movement = PolicyDrift()
    assert movement.take() == {}
    # Row 0 has the same version, row 1 is four versions old, row 2 is unknown; 9.0 marks untrained tokens.
    movement.add(*passed([[0.1, -0.3], [1.0, 9.0], [0.5, 0.5]], [0, 4, -1], [[1, 1], [1, 0], [1, 1]]))
    movement.add(*passed([[-0.2, 9.0], [-2.0, 0.0]], [0, 1], [[1, 0], [1, 1]]))
    found = movement.take()
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx((0.1 + 0.3 + 0.2) / 3)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(0.3)
    assert found["policy/moved"] == pytest.approx((1.0 + 2.0 + 0.0) / 3)
    assert found["policy/moved_versions"] == pytest.approx((4 + 1 + 1) / 3)
    deltas = [0.1, -0.3, 1.0, 0.5, 0.5, -0.2, -2.0, 0.0]
    assert found["policy/approx_kl"] == pytest.approx(
        sum(math.exp(value) - 1 - value for value in deltas) / len(deltas), rel=1e-5
    )
    assert movement.take() == {}


def test_metrics_without_tokens_are_left_out() -> None:
    movement = PolicyDrift()
    movement.add(*passed([[1.0]], [3], [[1]]))
    assert "sampling/sampling_logp_difference/mean" not in movement.take()


def test_version_ages_count_from_oldest_token() -> None:
    def row(version: int | None) -> TrainingRow:
        return TrainingRow([1], [2], [True], [-0.1], advantage=0.0, truncated=False, version=version)

    assert collate([row(3), row(7), row(9), row(None)], 7).ages.tolist() == [4, 0, 2, -1]
    assert collate([row(3)], None).ages.tolist() == [-1]
    group = rollout_group([1.0, 0.0])
    group.versions = [[(5, 2), (6, 1)], [(6, 3)]]
    assert [one.version for one in build_rows([group], small_config())] == [5, 6]


def test_step_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 2.0, 2.5, 10.0])
    monkeypatch.setattr("toprope.training.trainer.step_metrics.time.perf_counter", lambda: next(moments))
    clock = StepTimer()
    clock.start_preparing()
    clock.stop_preparing()
    found = clock.take({"step_time": 6.0}, waited=2.0)
    assert found == {
        "time/step": 10.0,
        "time/wait": 2.0,
        "time/prepare": 0.5,
        "time/passes": 3.5,
        "time/rest": 4.0,
    }


def test_zero_std_shares_by_kind() -> None:
    def flat(reward: float, success: bool, name: str) -> Group:
        group = rollout_group([reward] * 4, task=name)
        parts = {"parsed": float(success)}
        group.outcomes = [Outcome(reward, parts, success=success, error="no" if name == "c" else None)] * 4
        return group

    config = small_config(algorithm__drop_zero_signal=False, rollout__groups_per_step=4)
    groups = [flat(0.0, False, "a"), flat(1.0, True, "b"), flat(0.5, False, "c"), rollout_group([1.0, 0.0, 0.0, 0.0])]
    numbers = BatchSource(PreparedGroups(iter(groups)), config, lambda: False).next(0).metrics
    assert numbers["frac_reward_zero_std"] == 0.75
    shares = {name: numbers[f"frac_reward_zero_std/{name}"] for name in ("all_wrong", "all_right", "other")}
    assert shares == {"all_wrong": 0.25, "all_right": 0.25, "other": 0.25}
    assert numbers["errors/share"] == 0.25
    assert numbers["parse_failures"] == 0.5
    assert numbers["staleness/min"] == 0.0 and "groups/waiting" in numbers
