"""PPO's mathematics against an implementation in plain loops, and in cases worked out by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learning.ppo_reference import largest_error
from toprope.settings.schema import PpoSection
from toprope.training.trainer.step.ppo_loss import (
    compute_targets,
    generalized_advantages,
    rollout_tokens,
    step_loss,
    whiten,
)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gamma": 0.9, "gae_lambda": 0.5, "kl_coef": 0.2},
        {"whiten_advantages": False, "value_clip_range": 0.0, "entropy_coef": 0.05, "value_coef": 1.0},
        {"gae_lambda": 0.0, "clip_range": 0.05, "kl_coef": 0.05, "entropy_coef": 0.01},
        {"gae_lambda": 1.0, "clip_range": 0.5, "value_clip_range": 0.05, "value_coef": 0.5},
    ],
    ids=["defaults", "kl", "unclipped", "one-step", "monte-carlo"],
)
def test_loss_and_gradients_equal_plain_implementation(settings):
    section = PpoSection(**settings)
    assert max(largest_error(seed, section, gradients=seed < 2) for seed in range(8)) <= 1e-5


def test_rollout_tokens_join_turns_and_segments():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert rollout_tokens(mask, [3, 7, 3, 9]).tolist() == [[0, 2, 9], [4, 5, -1]]
    assert rollout_tokens(mask[3:], [0]).numel() == 0


def test_reward_is_given_once_at_last_token():
    """Two segments of one rollout; without discount and with lambda 1 every token's return is the reward."""
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]]).bool()
    section = PpoSection(gae_lambda=1.0, whiten_advantages=False)
    zero = torch.zeros(3, 3)
    values = torch.tensor([[0.2, 9.0, 0.4], [0.1, 0.3, 9.0], [0.5, 9.0, 9.0]])
    found = compute_targets(mask, [0, 0, 1], [2.0, 2.0, -1.0], values, zero, None, {}, section)
    assert found.returns.tolist() == [
        pytest.approx([2.0, 0.0, 2.0]), pytest.approx([2.0, 2.0, 0.0]), pytest.approx([-1.0, 0.0, 0.0])
    ]  # fmt: skip
    assert found.advantages[0].tolist() == pytest.approx([1.8, 0.0, 1.6])


def test_advantages_stop_at_end_of_rollout():
    rewards, values = torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([[0.5, 0.5, 7.0]])
    alive = torch.tensor([[True, True, False]])
    found = generalized_advantages(rewards, values, alive, 0.9, 0.8)
    last = 1.0 - 0.5
    assert found.tolist() == [pytest.approx([0.9 * 0.5 - 0.5 + 0.72 * last, last, 0.0])]


def test_given_advantages_replace_ours():
    mask, zero = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool(), torch.zeros(2, 3)
    section = PpoSection(gae_lambda=1.0)
    found = compute_targets(mask, [0, 1], [1.0, 0.0], zero, zero, None, {0: [0.5, 3.0, -0.5]}, section)
    assert found.advantages[0].tolist() == [0.5, 0.0, -0.5]
    assert found.returns[0].tolist() == [1.0, 0.0, 1.0]


def test_whitening_is_zero_outside_mask():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    scaled = whiten(torch.tensor([[1.0, 2.0, 50.0], [3.0, 9.0, 9.0]]), mask)
    assert scaled.tolist() == [pytest.approx([-1.0, 0.0, 0.0]), pytest.approx([1.0, 0.0, 0.0])]
    assert whiten(torch.ones(1, 1), torch.tensor([[True]])).tolist() == [[0.0]]


def test_losses_of_micro_batches_add_up():
    torch.manual_seed(0)
    mask = torch.rand(6, 5) < 0.6
    section = PpoSection(entropy_coef=0.1)
    logprobs, sampled, values, entropies = (torch.randn(6, 5) for _ in range(4))
    towards = compute_targets(mask, list(range(6)), [1.0, 0, 0, 1, 1, 0], torch.randn(6, 5), sampled, None, {}, section)
    tokens = float(mask.sum())

    def part(rows: slice) -> float:
        some = towards.part(list(range(6))[rows])
        return step_loss(
            logprobs[rows], values[rows], entropies[rows], mask[rows], sampled[rows], some, section, tokens
        ).total.item()

    assert part(slice(0, 2)) + part(slice(2, 6)) == pytest.approx(part(slice(0, 6)), abs=1e-6)
