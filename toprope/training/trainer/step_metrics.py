"""What a step shows beside TRL's own numbers: how far the policy moved since sampling, and where the time went.

TRL compares sampler and trainer only where vLLM samples in its own loop. Here tokens are some versions old, so the
difference is split: at equal version it is what the two programs compute differently (trl#4772), at older versions what
the policy has moved since.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from toprope.training.trainer.batch_source import Row

__all__ = ["AGES", "Movement", "StepClock", "ages"]

AGES = "ages"
"""Key of a batch beside those that TRL reads: R whole numbers, versions since a row was sampled; -1 where unknown."""


def ages(rows: list[Row], version: int | None, device: Any) -> torch.Tensor:
    """For each of R rows, how many versions ago its oldest token was sampled."""
    known = [-1 if version is None or row.version is None else max(version - row.version, 0) for row in rows]
    return torch.tensor(known, device=device)


class Movement:
    """Differences between the sampler's log-probabilities and the trainer's, over the passes of one step."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None

    def add(self, logps: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Takes in one pass.

        Args:
            logps: R x C, of the policy before the step.
            batch: What `collate` gives, with AGES.
        """
        mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
        delta = logps - batch["sampling_per_token_logps"]
        now = (batch[AGES] == 0).unsqueeze(1) & mask
        older = (batch[AGES] > 0).unsqueeze(1) & mask
        size, zero = delta.abs(), torch.zeros((), device=delta.device)
        # Schulman's estimator of KL(sampler || trainer) from the sampler's tokens: unbiased, never negative.
        divergence = torch.where(mask, delta.clamp(max=20.0).exp() - 1 - delta, zero)
        age = batch[AGES].clamp(min=0).unsqueeze(1) * older
        sums = torch.stack(
            [
                torch.where(now, size, zero).sum(),
                now.sum(),
                torch.where(older, size, zero).sum(),
                older.sum(),
                age.sum(),
                divergence.sum(),
                mask.sum(),
            ]
        )
        largest = torch.where(now, size, zero).max()
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def take(self) -> dict[str, float]:
        """The step's numbers, in nats a token; those of which there was no token are left out. Starts anew."""
        if self._sums is None or self._largest is None:
            return {}
        *sums, largest = torch.cat([self._sums, self._largest.unsqueeze(0)]).tolist()
        self._sums = self._largest = None
        now, now_count, older, older_count, age, divergence, count = sums
        numbers: dict[str, float] = {}
        if now_count:
            numbers["sampling/sampling_logp_difference/mean"] = now / now_count
            numbers["sampling/sampling_logp_difference/max"] = largest
        if older_count:
            numbers["policy/moved"] = older / older_count
            numbers["policy/moved_versions"] = age / older_count
        if count:
            numbers["policy/approx_kl"] = divergence / count
        return numbers


class StepClock:
    """Where a step's wall time goes, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._began = self._last
        self._preparing = 0.0

    def prepares(self) -> None:
        """Groups are there; tensors are made of them."""
        self._began = time.perf_counter()

    def prepared(self) -> None:
        """Tensors are there."""
        self._preparing += time.perf_counter() - self._began

    def take(self, numbers: dict[str, float | None], waited: float) -> dict[str, float]:
        """The step's times. Starts anew.

        Args:
            numbers: TRL's, with `step_time`: its passes, the waiting and preparing before them included.
            waited: Seconds for groups.

        Returns:
            time/step (since the step before), time/wait, time/prepare, time/passes (forward and backward), time/rest
            (optimizer, publishing, checkpoints, reports).
        """
        now = time.perf_counter()
        step, self._last = now - self._last, now
        prepared, self._preparing = self._preparing, 0.0
        passes = max((numbers.get("step_time") or 0.0) - waited - prepared, 0.0)
        rest = max(step - waited - prepared - passes, 0.0)
        return {
            "time/step": step,
            "time/wait": min(waited, step),
            "time/prepare": prepared,
            "time/passes": passes,
            "time/rest": rest,
        }
