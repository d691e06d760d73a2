"""Compare the costs of the arms of `make bench-orchestrator`: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.analysis.statistics.intervals import mean_interval

__all__ = ["Measured", "compared"]


@dataclass(frozen=True)
class Measured:
    """An evaluation on held-out tasks, with a 95 % interval of the accuracy."""

    accuracy: float
    low: float
    high: float
    tasks: int
    parts: Mapping[str, float]

    @property
    def usd_per_correct(self) -> float:
        """USD per right answer; infinite if none is right."""
        return self.parts["usd"] / self.accuracy if self.accuracy else float("inf")

    def __str__(self) -> str:
        return (
            f"accuracy {self.accuracy:.3f} [{self.low:.3f}, {self.high:.3f}], {self.usd_per_correct:.4f} USD per right "
            f"answer, energy {self.parts['energy']:.3f}, latency {self.parts['latency']:.3f}"
        )


def compared(fixed: Sequence[Measured], adaptive: Sequence[Measured]) -> dict[str, Any]:
    """Return how much cheaper a right answer is with adaptive weights, seed by seed, and the change of the accuracy.

    Args:
        fixed: By seed, weights that reward accuracy alone.
        adaptive: The same seeds.

    Returns:
        Figures by name. `accuracy_lost` counts the seeds whose intervals do not overlap, adaptive weights below.
    """
    cheaper = [100 * (1 - b.usd_per_correct / a.usd_per_correct) for a, b in zip(fixed, adaptive, strict=True)]
    higher = [b.accuracy - a.accuracy for a, b in zip(fixed, adaptive, strict=True)]
    figures = {
        "cost_reduction_percent": sum(cheaper) / len(cheaper),
        "cost_reduction_percent_by_seed": [round(one, 1) for one in cheaper],
        "usd_per_correct_fixed": [round(one.usd_per_correct, 5) for one in fixed],
        "usd_per_correct_adaptive": [round(one.usd_per_correct, 5) for one in adaptive],
        "accuracy_fixed": [one.accuracy for one in fixed],
        "accuracy_adaptive": [one.accuracy for one in adaptive],
        "accuracy_difference": sum(higher) / len(higher),
        "accuracy_lost": sum(b.high < a.low for a, b in zip(fixed, adaptive, strict=True)),
    }
    if len(cheaper) > 1:
        for name, values in (("cost_reduction_percent", cheaper), ("accuracy_difference", higher)):
            interval = mean_interval(values)
            figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    return figures
