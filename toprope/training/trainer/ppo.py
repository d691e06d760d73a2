"""Training with PPO: the groups, crew, metrics and checkpoints of GRPO, and a value function.

A step of the run is one batch of groups: `ppo.epochs` passes over it with `ppo.minibatches` updates each, then one
version is published. The importance ratio is against the sampler's own log-probabilities, however many versions lie
between, so the same clip bounds the passes over a batch and its age.

The value head reads the expected reward off the policy's last hidden state, one number per token. It uses the policy's
own trunk, so there is no second model in memory. In a checkpoint it is a file of its own (`value_head.safetensors`):
the published model, and the one that `from_pretrained` loads, stays a plain language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from toprope.settings.schema import LEAST_VALUE_RATE
from toprope.training.trainer.base import Learner
from toprope.training.trainer.optimization import make_optimizer
from toprope.training.trainer.ranks import Ranks
from toprope.training.trainer.step.forward import Scores
from toprope.training.trainer.step.learner import StepBatch, StepLearner, SteppedRun
from toprope.training.trainer.step.ppo_loss import Losses, Targets, compute_targets, step_loss

_VALUE_HEAD = "value_head"
"""Name of the value head's file in a checkpoint."""


class ValueHead(nn.Module):
    """One hidden layer as wide as the trunk, and one output, which begins at zero: before the first reward was seen, to
    expect nothing is the one guess that does no harm.

    Args:
        width: Size of the trunk's hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Values of hidden states: ... x width to ..."""
        values: torch.Tensor = self.out(torch.tanh(self.hidden(states)))
        return values.squeeze(-1).clone()  # a module whose parameters are split must not return a view


class PpoRun(SteppedRun):
    """One attempt of training with PPO."""

    _head: ValueHead

    def _make_learner(self, policy: Path) -> Learner:
        return self._make_step_learner(PpoLearner, policy, self._config.ppo.kl_coef)

    def _make_optimizer(self, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        section = self._config.optimizer
        torch.manual_seed(self._config.algorithm.seed)
        device = next(iter(trained.values())).device
        head = ValueHead(self._model.config.get_text_config().hidden_size).to(device)
        self._head = self._ranks.shard(head)
        optimizer = make_optimizer(self._config, trained)
        rate = self._config.ppo.value_learning_rate or max(section.learning_rate, LEAST_VALUE_RATE)
        optimizer.add_param_group({"params": list(self._head.parameters()), "lr": rate, "weight_decay": 0.0})
        return optimizer

    def _extra_modules(self) -> Mapping[str, nn.Module]:
        return {_VALUE_HEAD: self._head}


class PpoLearner(StepLearner):
    """`ppo.epochs` passes over each batch; the only module beside the model is the value head."""

    def _prepare(self, batch: StepBatch) -> tuple[Targets, dict[str, float | None]]:
        """Advantages and returns by value function and reference before the batch, and metrics of both."""
        section, tensors = self._config.ppo, batch.tensors
        self._model.eval()
        with torch.no_grad():
            values = torch.zeros_like(tensors.sampled)
            for numbers in self._shares(range(len(batch.rows))):
                values[numbers] = self._values(batch.part(numbers))
        values = self._ranks.sum(values)
        reference = self._ranks.sum(self._reference_logps(batch)) if section.kl_coef > 0 else None
        targets = compute_targets(
            tensors.mask,
            [row.rollout for row in batch.rows],
            [row.reward for row in batch.rows],
            values,
            tensors.sampled,
            reference,
            {place: row.token_advantages for place, row in enumerate(batch.rows) if row.token_advantages is not None},
            section,
        )
        metrics = _value_metrics(tensors.mask, targets)
        if reference is not None and bool(tensors.mask.any()):
            # The estimator that is never negative, as GRPO reports it.
            delta = (reference - tensors.sampled)[tensors.mask]
            metrics["kl"] = float((delta.exp() - 1 - delta).mean())
        return targets, metrics

    def _values(self, part: StepBatch) -> torch.Tensor:
        scores = self._score(part)
        self._hooks.beat()
        return torch.zeros_like(part.tensors.sampled) if scores is None or scores.values is None else scores.values

    def _score(self, part: StepBatch) -> Scores | None:
        return self._forward(
            part.rows,
            part.tensors.columns,
            value_head=self._modules[0],
            entropy_gradient=self._config.ppo.entropy_coef > 0,
        )

    def _update(
        self, step: int, batch: StepBatch, prepared: tuple[Targets, dict[str, float | None]]
    ) -> dict[str, float | None]:
        targets, metrics = prepared
        section, count = self._config.ppo, len(batch.rows)
        # From seed and step alone, so that a resumed run shuffles as an uninterrupted one.
        order = torch.Generator().manual_seed(self._config.algorithm.seed * 1_000_003 + step)
        sums = _LossSums(self._ranks)
        for epoch in range(section.epochs):
            for rows in torch.randperm(count, generator=order).tensor_split(min(section.minibatches, count)):
                tokens = batch.tensors.part(rows.tolist()).tokens
                if not tokens:
                    continue
                passes = self._shares(rows.tolist())
                for numbers in passes:
                    parts = batch.part(numbers), targets.part(numbers)
                    self._learn_part(*parts, tokens, sums, epoch == 0, len(passes))
                sums.finish_update(tokens, self._take_optimizer_step())
        return sums.metrics(section.value_coef, section.entropy_coef) | metrics

    def _learn_part(
        self, part: StepBatch, targets: Targets, tokens: float, sums: _LossSums, first: bool, passes: int
    ) -> None:
        scores, tensors = self._score(part), part.tensors
        if scores is None or scores.values is None:
            return
        if first:  # before these passes move the policy: comparable with other algorithms
            self._drift.add(scores.logps.detach(), tensors)
        loss = step_loss(
            scores.logps,
            scores.values,
            scores.entropies,
            tensors.mask,
            tensors.sampled,
            targets,
            self._config.ppo,
            tokens,
        )
        total, balance = loss.total, None
        if scores.aux_loss is not None:
            balance = self._forward.aux_weight * scores.aux_loss / (passes * self._ranks.count)
            total = total + balance
        self._backward(total)
        sums.add(loss, None if balance is None else balance.detach() * tokens, first=first)
        self._hooks.beat()


class _LossSums:
    """Sums the losses of the passes over a batch."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums: torch.Tensor | None = None
        self._first: torch.Tensor | None = None
        self._tokens = self._first_tokens = 0.0
        self._norms: list[torch.Tensor] = []
        self._is_first = True

    def add(self, loss: Losses, balance: torch.Tensor | None, *, first: bool) -> None:
        """Adds a pass; `balance` is the weighted load-balancing loss of a mixture of experts, for all tokens."""
        parts = [loss.policy, loss.value, loss.entropy, loss.clipped_low, loss.clipped_high, loss.value_clipped]
        parts.append(torch.zeros_like(loss.policy) if balance is None else balance)
        sums = torch.stack([part.double() for part in parts])
        self._sums = sums if self._sums is None else self._sums + sums
        self._is_first = first
        if first:
            self._first = sums if self._first is None else self._first + sums

    def finish_update(self, tokens: float, norm: torch.Tensor) -> None:
        self._tokens += tokens
        self._first_tokens += tokens if self._is_first else 0.0
        self._norms.append(norm.detach())

    def metrics(self, value_coef: float, entropy_coef: float) -> dict[str, float | None]:
        """Means per token over all passes; clip ratios and entropy over the first pass, comparable between runs."""
        if self._sums is None or self._first is None:
            return {"loss": 0.0, "grad_norm": 0.0}
        sums, first = self._ranks.sum(self._sums), self._ranks.sum(self._first)
        policy, value, entropy, low, high, value_clipped, balance = (sums / max(self._tokens, 1.0)).tolist()
        _, _, at_first, first_low, first_high, *_ = (first / max(self._first_tokens, 1.0)).tolist()
        return {
            "loss": policy + value_coef * value - entropy_coef * entropy + balance,
            "loss/policy": policy,
            "loss/value": value,
            "grad_norm": float(torch.stack(self._norms).mean()),
            "entropy": at_first,
            "clip_ratio/low_mean": first_low,
            "clip_ratio/high_mean": first_high,
            "clip_ratio/region_mean": first_low + first_high,
            "clip_ratio/all_epochs": low + high,
            "value/clip_ratio": value_clipped,
        }


def _value_metrics(mask: torch.Tensor, targets: Targets) -> dict[str, float | None]:
    """Metrics of the value function's predictions for the batch."""
    if not bool(mask.any()):
        return {}
    values, returns = targets.values[mask], targets.returns[mask]
    variance = returns.var(unbiased=False)
    metrics: dict[str, float | None] = {"value/mean": float(values.mean()), "returns/mean": float(returns.mean())}
    if float(variance) > 1e-12:
        metrics["value/explained_variance"] = float(1 - (returns - values).var(unbiased=False) / variance)
    return metrics
