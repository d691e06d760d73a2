"""Collates the rows of a batch into tensors, for any algorithm that trains on delivered groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from toprope.training.trainer.batch_source import TrainingRow


@dataclass(frozen=True)
class RowTensors:
    """R rows of at most C completion tokens, padded on the right."""

    mask: torch.Tensor
    """R x C, true where a token was sampled and counts."""
    sampled: torch.Tensor
    """R x C, log-probabilities of the sampler; 0 elsewhere, and in rows without them until the trainer's take their
    place."""
    advantages: torch.Tensor
    """R x 1, or R x C if an environment gave them per token."""
    ages: torch.Tensor
    """R, versions since the oldest sampled token of a row; -1 if unknown."""
    known: torch.Tensor
    """R, true for rows with the sampler's log-probabilities."""
    tokens: float
    """Number of trained tokens."""

    @property
    def columns(self) -> int:
        """C."""
        return self.mask.size(1)

    def part(self, numbers: Sequence[int]) -> RowTensors:
        """The tensors of some rows."""
        at = torch.tensor(numbers, dtype=torch.long, device=self.mask.device)
        mask = self.mask[at]
        tensors = self.sampled[at], self.advantages[at], self.ages[at], self.known[at]
        return RowTensors(mask, *tensors, float(mask.sum()))


def collate(rows: Sequence[TrainingRow], version: int | None, device: str | torch.device = "cpu") -> RowTensors:
    """The tensors of a batch.

    Args:
        rows: At least one row.
        version: Policy version that is trained; None if unknown.
        device: Where to put the tensors.
    """
    columns = max((len(row.completion) for row in rows), default=0)

    def padded(values: Sequence[float]) -> list[float]:
        return [*values, *[0.0] * (columns - len(values))]

    def tensor(values: Sequence[object], kind: type) -> torch.Tensor:
        return torch.from_numpy(numpy.array(values, kind)).to(device)  # a fifth of the time of torch.tensor

    mask = tensor([[*row.trained, *[False] * (columns - len(row.trained))] for row in rows], numpy.bool_)
    if any(row.token_advantages is not None for row in rows):
        advantages = [padded(row.token_advantages or [row.advantage] * len(row.completion)) for row in rows]
    else:
        advantages = [[row.advantage] for row in rows]
    ages = [-1 if version is None or row.version is None else abs(version - row.version) for row in rows]
    return RowTensors(
        mask=mask,
        sampled=tensor([padded(row.logprobs) for row in rows], numpy.float32),
        advantages=tensor(advantages, numpy.float32),
        ages=tensor(ages, numpy.int64),
        known=tensor([row.has_logprobs for row in rows], numpy.bool_),
        tokens=float(mask.sum()),
    )
