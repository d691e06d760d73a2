"""Advantages of groups, and the groups that have any: which make a step, and which are dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from tests.support.trainer_stand_ins import PreparedGroups, rollout_group, small_config
from toprope.records.journal.groups import MASKED, Group, Outcome
from toprope.records.messages import Skipping
from toprope.settings.changes import apply_changes
from toprope.settings.schema import Config
from toprope.training.trainer import batch_source
from toprope.training.trainer.batch_source import BatchSource, EndOfTraining, advantages, build_rows
from toprope.training.trainer.collate import collate
from toprope.training.trainer.environment_metrics import EnvironmentMetrics


def test_segments_of_a_rollout_share_one_advantage() -> None:
    group = Group(
        tokens=[[5, 9], [6, 8], [5, 7]],
        masks=[[MASKED, 9], [MASKED, 8], [MASKED, 7]],
        scores=[1.0, 1.0, 0.0],
        rollouts=[0, 0, 1],
        outcomes=[Outcome(1.0), Outcome(0.0)],
    )
    found = [row.advantage for row in build_rows([group], Config())]
    assert found[0] == found[1] == pytest.approx(-found[2])
    assert found == pytest.approx([0.5 / (0.5**0.5 + 1e-4)] * 2 + [-0.5 / (0.5**0.5 + 1e-4)])


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_unjudged_rollouts_are_compared_with_none(scale: Any) -> None:
    config = Config()
    config.algorithm.scale_rewards = scale
    known = [row.advantage for row in build_rows([rollout_group([1.0, 0.0, 0.5])], config)]
    group = rollout_group([1.0, 0.0, 0.5, 0.0])
    assert group.outcomes is not None
    group.outcomes[3].error, group.rollouts = "JudgeFailed: style: busy", [0, 1, 2]
    for rows in (group.tokens, group.masks, group.scores, group.inference_logprobs, group.versions):
        if rows is not None:
            del rows[3]
    assert [row.advantage for row in build_rows([group], config)] == pytest.approx(known)


def seated(rewards: list[float], *seats: str) -> Group:
    group = rollout_group(rewards)
    group.outcomes = [Outcome(reward, seat=seat) for reward, seat in zip(rewards, seats, strict=True)]
    return group


def test_a_seat_is_compared_with_the_same_seat() -> None:
    config = Config()
    config.algorithm.scale_rewards = "none"

    def found(rewards: list[float], *seats: str) -> list[float]:
        return [row.advantage for row in build_rows([seated(rewards, *seats)], config)]

    # The first player wins, whatever the second does: all that can be learned is in the one game that it lost.
    assert found([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0], *"01010101") == [
        0.5,
        -0.5,
        0.5,
        -0.5,
        -1.5,
        1.5,
        0.5,
        -0.5,
    ]
    assert found([1.0, -1.0, 1.0, -1.0], *"0101") == [0.0] * 4
    assert found([1.0, -1.0], "0", "1") == [1.0, -1.0], "a seat that one rollout has is compared with the group"
    assert found([1.0, -1.0, 1.0], "0", "1", "0") == [0.0, pytest.approx(-4 / 3), 0.0]
    assert found([1.0, 0.0, 0.5, 0.0], "0", "", "0", "") == [0.25, -0.375, -0.25, -0.375], "failed before they sat"


def test_a_failed_judge_leaves_its_seat_to_the_others_in_it() -> None:
    """Compared with the other seat, which wins more often, the seat-mate would be punished for sitting there."""
    config = Config()
    config.algorithm.scale_rewards = "none"
    group = seated([1.0, -1.0, 0.5, 0.0], *"0101")
    assert group.outcomes is not None
    group.outcomes[3].error = "JudgeFailed: style: busy"
    assert [row.advantage for row in build_rows([group], config)] == [0.25, 0.0, -0.25, 0.0]


def test_a_failed_judge_is_no_reward_in_the_metrics_of_a_step() -> None:
    group = rollout_group([1.0, 1.0, 0.0])
    assert group.outcomes is not None
    group.outcomes = [Outcome(1.0, success=True)] * 2 + [Outcome(0.0, error="JudgeFailed: style: busy")]
    found = batch_source._step_metrics([group], [group], [0], 0.0)
    assert (found["reward"], found["success"], found["unjudged"]) == (1.0, 1.0, 1.0)
    assert (found["frac_reward_zero_std/all_right"], found["errors"]) == (1.0, 1.0)
    group.environment = "a"
    own = EnvironmentMetrics(["a", "b"]).add_step([group], [group])
    assert (own["environments/a/reward"], own["environments/a/success"]) == (1.0, 1.0)


def test_deviation_of_a_batch_leaves_out_how_much_seats_win() -> None:
    """The first player wins by ten more, whatever it plays; the same batch without that has the same advantages."""
    config = Config()
    config.algorithm.scale_rewards = "batch"

    def found(favour: float, *seats: str) -> list[float]:
        games = [[1.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, 1.0]]
        groups = [seated([a + favour, b, c + favour, d], *seats) for a, b, c, d in games]
        return [row.advantage for row in build_rows(groups, config)]

    assert found(10.0, *"0101") == pytest.approx(found(0.25, *"0101"))
    # Less their means, the first player has 0.25, -0.75, 1.25, -0.75, the second -0.5, -0.5, 0.5, 0.5.
    assert found(10.0, *"0101")[0] == pytest.approx(0.5 / ((3.75 / 7) ** 0.5 + 1e-4))
    assert found(10.0, *[""] * 4)[0] != pytest.approx(found(0.25, *[""] * 4)[0])


@pytest.mark.parametrize(("seats", "dropped"), [("0101", True), ("0011", False), ("0000", False)])
def test_groups_whose_seats_decide_alone_have_no_signal(seats: str, dropped: bool) -> None:
    group = seated([1.0, -1.0, 1.0, -1.0], *seats)
    groups = PreparedGroups([group, rollout_group([1.0, 0.0], task="useful")])
    batch = BatchSource(groups, small_config(rollout__groups_per_step=1), is_ending=lambda: False).next(0)
    assert batch.unused == ([(0, "zero_signal")] if dropped else [])
    assert batch.metrics["frac_reward_zero_std"] == (0.5 if dropped else 0.0)


def test_given_advantages_are_used_per_token() -> None:
    given = Group(
        tokens=[[5, 9, 8], [6, 8]], masks=[[MASKED, 9, 8], [MASKED, 8]], scores=[1.0, 1.0],
        advantages=[[0.0, 0.5, -0.25], [0.0, 2.0]],
    )  # fmt: skip
    zeroed = Group(
        tokens=[[5, 9, 7], [5, 7]], masks=[[MASKED, 9, 7], [MASKED, 7]], scores=[1.0, 0.0],
        overrides=[{"set_advantage_to_zero": True}, {}],
    )  # fmt: skip
    config = Config()
    config.algorithm.scale_rewards = "none"
    batch = collate(build_rows([given, zeroed], config), 0)
    assert batch.advantages.tolist() == [[0.5, -0.25], [2.0, 0.0], [0.0, 0.0], [-0.5, 0.0]]
    assert collate(build_rows([zeroed], config)[1:], 0).advantages.tolist() == [[-0.5]]
    config.algorithm.shuffle_rewards = True  # the control knows nothing of the answers
    assert all(row.token_advantages is None for row in build_rows([given, zeroed], config))


@pytest.mark.parametrize(("last_advantage", "dropped"), [(None, True), (0.0, True), (1.0, False)])
def test_equal_scores_have_signal_if_advantages_differ(last_advantage: float | None, dropped: bool) -> None:
    equal, useful = rollout_group([1.0, 1.0]), rollout_group([1.0, 0.0], task="useful")
    if last_advantage is not None:
        equal.advantages = [[0.0] * len(row) for row in equal.tokens]
        equal.advantages[0][-1] = last_advantage
    groups = PreparedGroups([equal, useful])
    config = small_config(rollout__groups_per_step=1, rollout__group_size=2)
    batch = BatchSource(groups, config, is_ending=lambda: False).next(0)
    assert batch.unused == ([(0, "zero_signal")] if dropped else [])


def test_advantages_by_scale() -> None:
    assert advantages([1.0, 0.0], "none", 3.0) == [0.5, -0.5]
    assert advantages([1.0, 0.0], "batch", 2.0) == pytest.approx([0.25, -0.25], rel=1e-3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_advantages_of_exactly_zero_and_large_ones_finite(scale: Any) -> None:
    assert advantages([0.1] * 3, scale, 0.0) == [0.0] * 3
    assert advantages([1e160, 0.0], "group", 0.0) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_rloo_subtracts_mean_of_others() -> None:
    config, _ = apply_changes(Config(), {"algorithm.name": "rloo"})
    found = [row.advantage for row in build_rows([rollout_group([1.0, 0.0, 0.5, 0.5])], config)]
    assert found == pytest.approx([1 - 1 / 3, -2 / 3, 0.0, 0.0])


def test_shuffled_rewards_stay_within_group() -> None:
    group = rollout_group([0.0, 0.25, 0.5, 1.0])
    config = Config()
    plain = [row.advantage for row in build_rows([group], config)]
    config.algorithm.shuffle_rewards = True
    shuffled = []
    for number in range(20):
        group.group_id = f"g{number}"
        shuffled.append([row.advantage for row in build_rows([group], config)])
    assert all(sorted(values) == pytest.approx(sorted(plain)) for values in shuffled)
    assert len({tuple(values) for values in shuffled}) > 5


def test_shuffled_rewards_of_a_step_without_baselines_of_groups_change_groups() -> None:
    """PPO would learn from a group with many right answers, whichever of them has which reward."""
    groups = [rollout_group([1.0, 1.0, 1.0, 1.0], task="t"), rollout_group([0.0, 0.0, 0.0, 0.0], task="u")]
    config = Config()
    config.algorithm.shuffle_rewards = True
    config.algorithm.name = "ppo"
    means = set()
    for number in range(20):
        groups[0].group_id = f"g{number}"
        rewards = [row.reward for row in build_rows(groups, config)]
        assert sorted(rewards) == [0.0] * 4 + [1.0] * 4
        means.add(sum(rewards[:4]))
    assert len(means) > 2


def test_stale_and_flat_groups_are_counted_and_dropped() -> None:
    config = small_config(rollout__max_staleness=2)
    useful = [rollout_group([1.0, 0.0, 0.0, 0.0], version=9, task=str(n)) for n in range(2)]
    reader = PreparedGroups(
        iter([rollout_group([0.0] * 4, version=9), rollout_group([1.0, 0.0, 0.0, 1.0], version=3), *useful])
    )
    batch = BatchSource(reader, config, is_ending=lambda: False).next(version=10)
    assert [group.group_id for group in batch.groups] == [group.group_id for group in useful]
    assert batch.unused == [(0, "zero_signal"), (1, "stale")]
    assert batch.metrics["groups/delivered"] == 4
    assert batch.metrics["frac_reward_zero_std"] == 0.25
    assert batch.metrics["reward"] == pytest.approx((0 + 0.5 + 0.25 + 0.25) / 4)
    assert batch.metrics["staleness/max"] == 7
    assert batch.metrics["dropped/stale"] == 1
    assert batch.cursor == 4


def test_answers_that_were_cut_off_are_masked_and_groups_of_them_are_empty() -> None:
    cut, mixed = rollout_group([1.0, 0.0], task="cut"), rollout_group([1.0, 0.0], task="mixed")
    assert cut.outcomes is not None and mixed.outcomes is not None
    for outcome in (*cut.outcomes, mixed.outcomes[0]):
        outcome.truncated = True
    for masks, kept, trained in ((False, ["cut", "mixed"], [True, True]), (True, ["mixed", "more"], [False, True])):
        config = small_config(algorithm__mask_truncated_completions=masks, rollout__group_size=2)
        groups = PreparedGroups(iter([cut, mixed, rollout_group([1.0, 0.0], task="more")]))
        batch = BatchSource(groups, config, is_ending=lambda: False).next(0)
        assert [group.group_id.partition("-")[0] for group in batch.groups] == kept
        assert batch.unused == ([(0, "empty")] if masks else [])
        assert [all(row.trained) for row in build_rows([mixed], config)] == trained


def test_groups_without_signal_are_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that is always wrong gives thousands of them before a step."""
    monkeypatch.setattr(batch_source, "_MOST_SEEN", 5)
    monkeypatch.setattr(batch_source, "_TELL_S", -1.0)
    told: list[Skipping] = []
    flat = [(rollout_group([0.0] * 4, task=str(n)) for n in range(count)) for count in (30, 10)]
    useful = [[rollout_group([1.0, 0.0, 0.0, 0.0], task=f"u{n}")] for n in range(2)]
    most = [0]

    def noted() -> Iterator[Group]:
        before = sum(type(one) is Group for one in gc.get_objects())
        for group in chain(flat[0], useful[0], flat[1], useful[1]):
            most[0] = max(most[0], sum(type(one) is Group for one in gc.get_objects()) - before)
            yield group

    source = BatchSource(PreparedGroups(noted()), small_config(), is_ending=lambda: False, tell=told.append)
    batch = source.next(version=0)
    assert told[0] == Skipping({"zero_signal": 2}, 0, 2) and Skipping({"zero_signal": 30}, 0, 2) in told
    assert told[-1] == Skipping({"zero_signal": 10}, 1, 2), "those in a row count, and a whole step is no news"
    assert batch.metrics["groups/delivered"] == 42 and batch.rollouts == 4 * 42
    assert most[0] < 15, "all groups are in memory at once"
    assert batch.metrics["dropped/zero_signal"] == 40 and len(batch.unused) == 40
    assert batch.metrics["frac_reward_zero_std"] == 4 / 5


def test_ending_run_raises_end_of_training() -> None:
    with pytest.raises(EndOfTraining):
        BatchSource(PreparedGroups(iter([])), small_config(), is_ending=lambda: True).next(0)


def test_cursor_stays_before_unfinished_batch() -> None:
    """The last checkpoint commits the cursor, which must not pass groups that nobody trained on."""
    ending = [False]
    groups = PreparedGroups(rollout_group([1.0, 0.0, 0.0, 0.0], task=str(n)) for n in range(3))
    source = BatchSource(groups, small_config(), lambda: ending[0] and groups.sent == 3)
    assert source.next(0).cursor == source.cursor == 2
    ending[0] = True
    with pytest.raises(EndOfTraining):
        source.next(0)
    assert source.cursor == 2
