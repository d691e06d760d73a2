"""Training with a loss of the GRPO family on the groups that the trajectory API delivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from toprope.training.trainer.base import Learner
from toprope.training.trainer.batch_source import TrainingRow
from toprope.training.trainer.step.grpo_loss import GrpoMetrics, StepSize, grpo_loss
from toprope.training.trainer.step.learner import StepBatch, StepLearner, SteppedRun

_SAMPLED = 8
"""One of this many rows without an advantage is scored, for metrics."""


class GrpoRun(SteppedRun):
    """One attempt of training with a loss of the GRPO family."""

    def _make_learner(self, policy: Path) -> Learner:
        return self._make_step_learner(GrpoLearner, policy, self._config.algorithm.beta)


class GrpoLearner(StepLearner):
    """One update per batch of groups, with the gradients of its micro-batches added up."""

    def _prepare(self, batch: StepBatch) -> torch.Tensor | None:
        return self._reference_logps(batch) if self._config.algorithm.beta else None

    def _update(self, step: int, batch: StepBatch, prepared: torch.Tensor | None) -> dict[str, float | None]:
        config, metrics = self._config, GrpoMetrics(self._ranks)
        lengths = Counter[int]()
        for row in batch.rows:
            lengths[row.rollout] += sum(row.trained)
        size = StepSize(len(lengths), batch.tensors.tokens, config.rollout.max_new_tokens)
        answers = torch.tensor([float(lengths[row.rollout]) for row in batch.rows], device=self._forward.device)
        moving = self._moving(batch.rows)
        chosen, chosen_counts = _sample_of_others(batch.rows, moving, step)
        weights = torch.ones((len(batch.rows), 2), device=self._forward.device)
        weights[chosen] = torch.tensor(chosen_counts, device=self._forward.device)
        passes = self._shares([*moving, *chosen])
        for numbers in passes:
            part = batch.part(numbers)
            tensors, counts = part.tensors, weights[numbers]
            scores = self._forward(part.rows, tensors.columns)
            if scores is None:
                continue
            self._drift.add(scores.logps.detach(), tensors, counts[:, 0])
            loss = grpo_loss(
                scores.logps,
                scores.entropies,
                tensors.sampled,
                tensors.advantages,
                tensors.mask,
                None if prepared is None else prepared[numbers],
                config.algorithm,
                size,
                counts,
                answers[numbers],
            )
            total = loss.total
            if scores.aux_loss is not None:
                total = total + self._forward.aux_weight * scores.aux_loss / (len(passes) * self._ranks.count)
            metrics.add(loss, total, scores.aux_loss)
            self._backward(total)
            self._hooks.beat()
        norm = self._take_optimizer_step()
        return metrics.read() | {"grad_norm": float(norm)}

    def _moving(self, rows: Sequence[TrainingRow]) -> Sequence[int]:
        """Numbers of the rows that move the policy. Those without an advantage, as where all answers of a group were
        right, have gradients of exactly 0 if the loss has no further term. One is kept if there are no others, because
        the optimizer's moments still move the policy."""
        if self._config.algorithm.beta or self._forward.aux_weight:
            return range(len(rows))
        scored = [number for number, row in enumerate(rows) if any(row.trained)]
        moving = [
            number
            for number in scored
            if (
                rows[number].advantage
                if (token_advantages := rows[number].token_advantages) is None
                else any(token_advantages)
            )
        ]
        return moving or scored[:1] or range(min(1, len(rows)))


def _sample_of_others(
    rows: Sequence[TrainingRow], moving: Sequence[int], step: int
) -> tuple[list[int], tuple[float, float]]:
    """Numbers of some of the rows that do not move the policy, and how many tokens each token of theirs stands for,
    and how many rows each row.

    Metrics are about all rows of a step, because those that move the policy are not like the others. A pass over the
    others costs a small policy as much as skipping their gradients saves. The rows of a group are alike, so one of
    eight is enough; every row has its turn, so that means over steps have no bias. Beside the moving rows it needs no
    pass of its own, and its gradient is 0.
    """
    moving_numbers = set(moving)
    others = [number for number, row in enumerate(rows) if number not in moving_numbers and any(row.trained)]
    if not others:
        return [], (1.0, 1.0)
    stride = min(_SAMPLED, len(others))
    chosen = others[step % stride :: stride]
    tokens = [sum(sum(rows[number].trained) for number in numbers) for numbers in (others, chosen)]
    return chosen, (tokens[0] / tokens[1], len(others) / len(chosen))
