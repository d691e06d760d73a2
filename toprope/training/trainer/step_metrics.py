"""Step metrics beside TRL's own: how far the policy moved since sampling, and where the time went.

TRL compares sampler and trainer only if vLLM samples in its own loop. Here tokens are some versions old, so the
difference is split: at the same version it is numerical difference between the two programs (trl#4772), at older
versions it is the movement of the policy since.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from toprope.training.trainer.collate import RowTensors
    from toprope.training.trainer.ranks import Ranks


class PolicyDrift:
    """Differences between the sampler's log-probabilities and the trainer's, over the passes of one step."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None

    def add(self, logps: torch.Tensor, batch: RowTensors, counts: torch.Tensor | None = None) -> None:
        """Adds one pass; rows without the sampler's log-probabilities have no difference to tell.

        Args:
            logps: R x C log-probabilities under the policy before the step.
            batch: Tensors from `collate`.
            counts: R, how many rows each stands for; 1 if not given.
        """
        import torch

        mask = batch.mask & batch.known.unsqueeze(1)
        delta = logps - batch.sampled
        ages = batch.ages.unsqueeze(1)
        weight = mask.to(delta.dtype) if counts is None else mask * counts.unsqueeze(1)
        current, older = (ages == 0) * weight, (ages > 0) * weight
        size = delta.abs()
        # Schulman's k3 estimator of KL(sampler || trainer) from the sampler's tokens: unbiased, never negative.
        divergence = delta.clamp(max=20.0).exp() - 1 - delta
        sums = torch.stack(
            [
                (current * size).sum(),
                current.sum(),
                (older * size).sum(),
                older.sum(),
                (older * ages).sum(),
                (weight * divergence).sum(),
                weight.sum(),
            ]
        )
        largest = torch.where(current > 0, size, 0.0).amax() if mask.numel() else sums.new_zeros(())
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def take(self, ranks: Ranks | None = None) -> dict[str, float]:
        """Metrics of the step in nats per token, without those that have no token; resets the sums.

        Args:
            ranks: The ranks that have parts of the step.
        """
        import torch

        if self._sums is None or self._largest is None:
            return {}
        if ranks is not None:
            self._sums, self._largest = ranks.sum(self._sums), ranks.largest(self._largest)
        *sums, largest = torch.cat([self._sums, self._largest.unsqueeze(0)]).tolist()
        self._sums = self._largest = None
        current, current_count, older, older_count, age, divergence, count = sums
        metrics: dict[str, float] = {}
        if current_count:
            metrics["sampling/sampling_logp_difference/mean"] = current / current_count
            metrics["sampling/sampling_logp_difference/max"] = largest
        if older_count:
            metrics["policy/moved"] = older / older_count
            metrics["policy/moved_versions"] = age / older_count
        if count:
            metrics["policy/approx_kl"] = divergence / count
        return metrics


class StepTimer:
    """Splits the wall time of a step, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._began = self._last
        self._preparing = 0.0

    def start_preparing(self) -> None:
        """Mark the start of tensor preparation."""
        self._began = time.perf_counter()

    def stop_preparing(self) -> None:
        """Mark the end of tensor preparation."""
        self._preparing += time.perf_counter() - self._began

    def take(self, metrics: dict[str, float | None], waited: float) -> dict[str, float]:
        """Times of the step; resets the timer.

        Args:
            metrics: TRL's, with `step_time`: its passes, including the waiting and preparing before them.
            waited: Seconds spent waiting for groups.

        Returns:
            time/step (since the step before), time/wait, time/prepare, time/passes (forward and backward), time/rest
            (optimizer, publishing, checkpoints, reports).
        """
        now = time.perf_counter()
        step, self._last = now - self._last, now
        prepared, self._preparing = self._preparing, 0.0
        passes = max((metrics.get("step_time") or 0.0) - waited - prepared, 0.0)
        return {
            "time/step": step,
            "time/wait": min(waited, step),
            "time/prepare": prepared,
            "time/passes": passes,
            "time/rest": max(step - waited - prepared - passes, 0.0),
        }
