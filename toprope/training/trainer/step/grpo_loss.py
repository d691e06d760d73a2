"""Losses of the GRPO family over delivered groups. Tensors in and out.

The importance ratio is between the trained policy and the one that sampled, however many versions lie between. With
`algorithm.importance_sampling_mode` the two are told apart: the ratio that is clipped is to the policy before the step,
and a bounded weight corrects for the sampler, as TRL does with vLLM. Sums are divided by the size of the whole step, so
that the gradients of its micro-batches add up.

Sources: `toprope.settings.sections.algorithms` names the paper of each loss; the KL estimator is Schulman's k3,
weighted by the importance ratio (DeepSeek-V3.2, arXiv:2512.02556). TRL 1.16 is the reference:
tests/training/trainer/step/test_grpo_loss.py compares losses, gradients and metrics with its GRPOTrainer, whose
defaults the constants are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from toprope.settings.schema import AlgorithmSection
from toprope.training.trainer.ranks import Ranks

_SAPO_TEMPERATURE, _SAPO_TEMPERATURE_NEGATIVE = 1.0, 1.05
_VESPO, _VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""Exponent and rate of VESPO's weight, for advantages of 0 or more and below 0."""
_SMALLEST_RATIO, _LARGEST_LOG_RATIO = 1e-8, 20.0


@dataclass(frozen=True)
class StepSize:
    """Size of a whole optimizer step, over all its micro-batches."""

    rollouts: int
    tokens: float
    """Number of trained tokens."""
    longest: int
    """`rollout.max_new_tokens`."""


@dataclass(frozen=True)
class GrpoLoss:
    """The loss of a pass and its metrics."""

    total: torch.Tensor
    means: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Sum and count of each metric that is a mean."""
    largest: dict[str, torch.Tensor]
    """Values whose largest is a metric; NaN where there is none."""
    smallest: dict[str, torch.Tensor]


def grpo_loss(
    logps: torch.Tensor,
    entropies: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    reference: torch.Tensor | None,
    section: AlgorithmSection,
    size: StepSize,
    counts: torch.Tensor | None = None,
    answers: torch.Tensor | None = None,
) -> GrpoLoss:
    """The loss of one pass over R rows of at most C tokens.

    Without a KL term, rows whose advantages are all 0 have a loss and a gradient of exactly 0, however far their ratio
    is from 1.

    Args:
        logps, entropies: R x C log-probabilities and entropies of the policy.
        sampled: R x C log-probabilities of the sampler.
        advantages: R x 1, or R x C if an environment gave them per token.
        mask: R x C, true where a token was sampled and counts.
        reference: R x C log-probabilities of the starting policy; None without a KL term.
        section: Settings.
        size: Size of the step that the rows belong to.
        counts: R x 2, how many tokens each token of a row stands for in the means, and how many rows the row; 1 if
            not given.
        answers: R, trained tokens of the whole answer that a row belongs to; those of the row if not given. A mean over
            answers counts the segments of one together. Ratios of sequences are by segment, which may lie in different
            passes.
    """
    weight = mask.to(logps.dtype)
    lengths = weight.sum(-1)
    answers = lengths if answers is None else answers
    per_token, per_row = torch.ones_like(lengths).expand(2, -1) if counts is None else counts.unbind(-1)
    counted, rows, tokens = weight * per_token.unsqueeze(1), per_row.sum(), (lengths * per_token).sum()
    moves = (advantages != 0).any(-1, keepdim=True)
    if reference is None:  # the ratio may overflow, and infinity times 0 is no number
        logps = torch.where(moves, logps, logps.detach())
    means: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    largest: dict[str, torch.Tensor] = {}
    smallest: dict[str, torch.Tensor] = {}

    def note(name: str, values: torch.Tensor) -> None:
        values = values.detach()
        if values.size(1) == 1:  # one value per row
            means[name] = (values.squeeze(1) * per_row).sum(), rows
        else:
            means[name] = (values * counted).sum(), tokens

    before, correction = sampled, None
    if section.importance_sampling_mode != "none":
        before = logps.detach()
        correction = sampler_weights(before, sampled, mask, section)
        note("sampling/importance_sampling_ratio/mean", correction)
        ratios = correction.masked_fill(~mask, math.nan) if correction.size(1) > 1 else correction
        largest["sampling/importance_sampling_ratio/max"] = smallest["sampling/importance_sampling_ratio/min"] = ratios
    log_ratio = (logps - before) * weight
    per_sequence = section.importance_sampling_level == "sequence"
    if section.loss_type == "rloo":  # the ratio of the whole answer, without GSPO's root
        ratio = torch.exp(log_ratio.sum(-1, keepdim=True))
    elif per_sequence:
        ratio = torch.exp((log_ratio.sum(-1) / lengths.clamp(min=1.0)).unsqueeze(-1))
    else:
        ratio = torch.exp(log_ratio)
    kind, low, high = section.loss_type, section.epsilon, section.epsilon_high
    if kind == "cispo":
        loss = -ratio.clamp(max=high).detach() * advantages * logps
        note("cispo_clip_ratio", ((ratio > high) & (advantages > 0)).float())
    elif kind == "sapo":
        temperature = torch.where(advantages > 0, _SAPO_TEMPERATURE, _SAPO_TEMPERATURE_NEGATIVE)
        loss = -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    elif kind == "vespo":
        phi = _vespo_weight(log_ratio.detach(), advantages)
        loss = -phi * advantages * logps
        note("vespo/phi_seq_mean", phi)
    else:
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        is_low, is_high = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
        for name, clipped in (("low_mean", is_low), ("high_mean", is_high), ("region_mean", is_low | is_high)):
            note(f"clip_ratio/{name}", clipped.float())
        smallest["clip_ratio/low_min"] = _row_means(is_low.float(), weight, lengths)
        largest["clip_ratio/high_max"] = _row_means(is_high.float(), weight, lengths)
    if correction is not None:
        loss = loss * correction
    if reference is not None:
        delta = (reference - logps) * weight
        divergence = (torch.exp(delta) - delta - 1) * ratio
        note("kl", divergence)
        if section.loss_type == "rloo":  # the divergence is a mean over the whole answer
            divergence = divergence * (lengths.clamp(min=1.0) / answers.clamp(min=1.0)).unsqueeze(-1)
        loss = loss + section.beta * divergence
    else:
        loss = torch.where(moves, loss, torch.zeros_like(loss))
    note("entropy", entropies)
    loss = loss * weight
    if kind in ("grpo", "sapo", "rloo"):
        # The log-probabilities of segments add up to the whole answer's, so in RLOO their losses do, too.
        token_counts = lengths if kind == "rloo" else answers
        total = (loss.sum(-1) / token_counts.clamp(min=1.0)).sum() / max(size.rollouts, 1)
    elif kind == "luspo":
        total = loss.sum() / max(size.rollouts, 1)
    elif kind == "dr_grpo":
        total = loss.sum() / (max(size.rollouts, 1) * size.longest)
    else:
        total = loss.sum() / max(size.tokens, 1.0)
    return GrpoLoss(total, means, largest, smallest)


def sampler_weights(
    before: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, section: AlgorithmSection
) -> torch.Tensor:
    """Importance weights of the policy before the step against the sampler, bounded.

    Args:
        before, sampled: R x C log-probabilities of both.
        mask: R x C, true where a token was sampled and counts.
        section: Mode and bounds. Truncated weights are clamped to the bounds; masked ones are 0 outside of them.

    Returns:
        R x C weights of tokens, or R x 1 of whole answers.
    """
    mode, low, high = (
        section.importance_sampling_mode, section.importance_sampling_clip_min, section.importance_sampling_clip_max
    )  # fmt: skip
    difference = torch.where(mask, before - sampled, torch.zeros_like(before))
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    weights = torch.exp(difference)
    if mode.endswith("truncate"):
        return weights.clamp(min=low, max=high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def _row_means(values: torch.Tensor, weight: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return values.squeeze(1) if values.size(1) == 1 else (values * weight).sum(-1) / lengths


def _vespo_weight(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Weight of a whole answer by its importance ratio w: e^rate * w^exponent * e^(-rate * w), which is 1 at w = 1.

    Args:
        log_ratio: R x C, 0 where nothing counts.
        advantages: R x 1 or R x C; the weight has the same shape.
    """
    limit = _LARGEST_LOG_RATIO
    whole = log_ratio.clamp(-limit, limit).sum(-1, keepdim=True).clamp(math.log(_SMALLEST_RATIO), limit)
    exponent = torch.where(advantages >= 0, _VESPO[0], _VESPO_NEGATIVE[0])
    rate = torch.where(advantages >= 0, _VESPO[1], _VESPO_NEGATIVE[1])
    return torch.exp(rate + exponent * whole - rate * torch.exp(whole)).nan_to_num(0.0, 0.0, 0.0)


class GrpoMetrics:
    """Metrics of a step under TRL's names, over its passes.

    Args:
        ranks: The ranks that have parts of the step.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._losses: list[torch.Tensor] = []
        self._means: dict[str, list[torch.Tensor]] = {}
        self._extremes: dict[tuple[str, int], list[torch.Tensor]] = {}
        """Values by the name of the metric and their sign: -1 for a smallest value."""

    def add(self, loss: GrpoLoss, total: torch.Tensor, aux_loss: torch.Tensor | None = None) -> None:
        """Adds a pass.

        Args:
            total: The loss with everything that was added to it.
            aux_loss: Load-balancing loss of a mixture of experts.
        """
        self._losses.append(total.detach())
        if aux_loss is not None:
            pair = aux_loss.detach(), torch.ones_like(aux_loss)
            self._means.setdefault("aux_loss", []).append(torch.stack(pair))
        for name, pair in loss.means.items():
            self._means.setdefault(name, []).append(torch.stack(pair))
        for sign, values in ((1, loss.largest), (-1, loss.smallest)):
            for name, tensor in values.items():
                lowest = tensor.new_full((1,), -math.inf)
                signed = torch.cat([sign * tensor.detach().flatten(), lowest])
                finite = signed.nan_to_num(nan=-math.inf, neginf=-math.inf)
                self._extremes.setdefault((name, sign), []).append(finite.max())

    def read(self) -> dict[str, float | None]:
        """The metrics; means over all tokens of the step, or over its rows where the loss has one ratio per row."""
        if not self._losses:
            return {"loss": 0.0}
        names = list(self._means)
        pairs = torch.stack([torch.stack(self._means[name]).sum(0) for name in names])
        # One transfer from the device for all of them.
        numbers = self._ranks.sum(torch.cat([torch.stack(self._losses).sum().reshape(1), pairs.flatten()])).tolist()
        metrics: dict[str, float | None] = {"loss": numbers[0]}
        for place, name in enumerate(names):
            total, count = numbers[1 + 2 * place : 3 + 2 * place]
            metrics[name] = total / count if count else 0.0
        if self._extremes:
            local = torch.stack([torch.stack(maxima).max() for maxima in self._extremes.values()])
            extremes = self._ranks.largest(local)
            named_extremes = zip(self._extremes, extremes.tolist(), strict=True)
            metrics |= {name: sign * value for (name, sign), value in named_extremes if math.isfinite(value)}
        return metrics
