"""The mathematics of PPO over rollouts of several turns: rewards by token, advantages, losses. Tensors in and out.

Only sampled tokens are steps of the decision process. Tokens that an environment wrote in between are skipped: the last
token of a turn is followed by the first token of the next. Segments of one rollout (rows whose prompts do not extend
each other) are joined in the same way, in their order.

Sources: clipped loss, Schulman et al. 2017 (arXiv:1707.06347), equation 7; advantages, Schulman et al. 2016
(arXiv:1506.02438), equation 16; clipped value loss and whitening as in OpenAI's baselines and TRL's former PPOTrainer;
the KL penalty inside the reward, token by token, as in Ouyang et al. 2022 (arXiv:2203.02155), equation 2.
tests/training/trainer/step/test_ppo_loss.py compares all of it with an implementation in plain loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toprope.settings.schema import PpoSection


@dataclass(frozen=True)
class Targets:
    """Training targets of a batch, R x C each; zero where nothing was sampled."""

    advantages: torch.Tensor
    returns: torch.Tensor
    """Targets of the value function."""
    values: torch.Tensor
    """Values before the batch."""

    def part(self, rows: list[int]) -> Targets:
        """The targets of some rows."""
        at = torch.tensor(rows, dtype=torch.long, device=self.values.device)
        return Targets(self.advantages[at], self.returns[at], self.values[at])


@dataclass(frozen=True)
class Losses:
    """The loss of a pass and its parts; all but `total` are detached sums over its tokens."""

    total: torch.Tensor
    policy: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    value_clipped: torch.Tensor


def rollout_tokens(mask: torch.Tensor, rollouts: list[int]) -> torch.Tensor:
    """Positions of the sampled tokens of every rollout, in order.

    Args:
        mask: R x C, true where a token was sampled and counts.
        rollouts: For each row the number of its rollout.

    Returns:
        N x L flat positions (row * C + column) for N rollouts of at most L tokens, -1 behind the end of shorter ones.
        Rollouts without a token are left out.
    """
    columns = mask.size(1)
    parts_by_rollout: dict[int, list[torch.Tensor]] = {}
    for row, rollout in enumerate(rollouts):
        parts_by_rollout.setdefault(rollout, []).append(mask[row].nonzero().squeeze(1) + row * columns)
    joined = [torch.cat(parts) for parts in parts_by_rollout.values()]
    joined = [positions for positions in joined if len(positions)]
    if not joined:
        return torch.full((0, 0), -1, dtype=torch.long, device=mask.device)
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=-1)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, alive: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Generalized advantage estimation over N rollouts of at most L steps; the value after an end is 0.

    Args:
        rewards, values: N x L.
        alive: N x L, true for the steps that exist; a rollout's steps are at its beginning.
        gamma: Discount.
        lam: Lambda.

    Returns:
        N x L advantages; 0 where there is no step.
    """
    advantages = torch.zeros_like(values)
    following = next_value = values.new_zeros(values.size(0))
    for step in range(values.size(1) - 1, -1, -1):
        exists = alive[:, step].to(values.dtype)
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        following = (delta + gamma * lam * following) * exists
        next_value = values[:, step] * exists
        advantages[:, step] = following
    return advantages


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scales to mean 0 and variance 1 (with Bessel's correction) where `mask` is true; 0 elsewhere."""
    chosen = values[mask]
    if len(chosen) < 2:
        return torch.zeros_like(values)
    scaled = (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8)
    return torch.where(mask, scaled, torch.zeros_like(values))


def compute_targets(
    mask: torch.Tensor,
    rollouts: list[int],
    scores: list[float],
    values: torch.Tensor,
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    given: dict[int, list[float]],
    section: PpoSection,
) -> Targets:
    """Advantages and returns of a batch of R rows.

    Args:
        mask: R x C, true where a token was sampled and counts.
        rollouts: For each row the number of its rollout.
        scores: For each row the reward of its rollout, which is given at the rollout's last token.
        values: R x C values before the batch.
        logprobs: R x C log-probabilities of the sampler.
        reference: R x C log-probabilities of the starting policy; None without a KL penalty.
        given: Token-level advantages of the environment by row; they replace ours unscaled.
        section: Settings.
    """
    zero = torch.zeros_like(values)
    rewards = zero.clone()
    if reference is not None:
        rewards = torch.where(mask, -section.kl_coef * (logprobs - reference), zero)
    positions = rollout_tokens(mask, rollouts)
    alive = positions >= 0
    flat_rewards = rewards.flatten()
    if len(positions):
        last = positions.gather(1, (alive.sum(1, keepdim=True) - 1)).squeeze(1)
        by_row = torch.tensor(scores, dtype=values.dtype, device=values.device)
        flat_rewards[last] += by_row[last // mask.size(1)]
    places = positions.clamp(min=0)
    estimates = generalized_advantages(
        flat_rewards[places] * alive,
        values.flatten()[places] * alive,
        alive,
        section.gamma,
        section.gae_lambda,
    )
    flat = zero.flatten()
    flat[positions[alive]] = estimates[alive]
    advantages = flat.view_as(values)
    returns = torch.where(mask, advantages + values, zero)
    if section.whiten_advantages:
        advantages = whiten(advantages, mask)
    for row, row_advantages in given.items():
        length = len(row_advantages)
        replaced = torch.tensor(row_advantages, dtype=values.dtype, device=values.device)
        advantages[row, :length] = torch.where(mask[row, :length], replaced, zero[row, :length])
    return Targets(advantages, returns, torch.where(mask, values, zero))


def step_loss(
    logprobs: torch.Tensor,
    values: torch.Tensor,
    entropies: torch.Tensor,
    mask: torch.Tensor,
    sampled: torch.Tensor,
    targets: Targets,
    section: PpoSection,
    tokens: float,
) -> Losses:
    """The loss of one pass over R rows.

    Args:
        logprobs, values, entropies: R x C, of the current policy.
        mask: R x C, true where a token was sampled and counts.
        sampled: R x C log-probabilities of the sampler.
        targets: Targets of the same rows.
        section: Settings.
        tokens: Number of tokens of the update; sums are divided by it, so that the losses of its passes add up.
    """
    zero, weight = torch.zeros_like(logprobs), 1.0 / max(tokens, 1.0)
    ratio = torch.exp(torch.where(mask, logprobs - sampled, zero))
    clip = section.clip_range
    unclipped, clipped = ratio * targets.advantages, ratio.clamp(1 - clip, 1 + clip) * targets.advantages
    policy = torch.where(mask, -torch.min(unclipped, clipped), zero).sum()
    error = (values - targets.returns) ** 2
    value_clipped = torch.zeros_like(mask)
    if section.value_clip_range > 0:
        change = (values - targets.values).clamp(-section.value_clip_range, section.value_clip_range)
        clipped_values = targets.values + change
        clipped_error = (clipped_values - targets.returns) ** 2
        value_clipped, error = mask & (clipped_error > error), torch.max(error, clipped_error)
    value = 0.5 * torch.where(mask, error, zero).sum()
    entropy = torch.where(mask, entropies, zero).sum()
    total = weight * (policy + section.value_coef * value - section.entropy_coef * entropy)
    with torch.no_grad():
        low = mask & (ratio < 1 - clip) & (targets.advantages < 0)
        high = mask & (ratio > 1 + clip) & (targets.advantages > 0)
    return Losses(total, policy.detach(), value.detach(), entropy.detach(), low.sum(), high.sum(), value_clipped.sum())
