"""Whether the last experiments still moved anything: a pure function over what the ledger measured.

Held against the noise floor: what two runs that differ by chance alone may differ by. It is the larger of what the
number of tasks leaves open (two shares of n tasks each) and, where configurations were run with several seeds, what the
seeds made of them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from toprope.analysis.statistics.intervals import t_quantile
from toprope.records.experiments import Experiment

__all__ = ["Plateau", "noise_floor", "plateau"]

_Z = 1.96


@dataclass(frozen=True)
class Plateau:
    """The last `count` measured experiments against the best before them; shares between 0 and 1."""

    environment: str
    count: int
    best_before: float
    best_since: float
    floor: float
    from_seeds: bool
    """Whether the floor is what seeds made, and not the number of tasks."""
    stands: bool
    """Whether the gain stays below the floor."""

    @property
    def says(self) -> str:
        """One sentence."""
        why = "seeds of one configuration differ by" if self.from_seeds else "so many tasks leave open"
        head = (
            f"{self.environment}: the best of the last {self.count} measured experiments is "
            f"{100 * self.best_since:.1f}%, the best before {100 * self.best_before:.1f}%"
        )
        if self.stands:
            return (
                f"Plateau. {head}: no more than the {100 * self.floor:.1f} points that {why}. Try something of another "
                "kind, or stop."
            )
        return f"{head}: more than the {100 * self.floor:.1f} points that {why}."


def noise_floor(experiments: Sequence[Experiment]) -> tuple[float, bool] | None:
    """The difference of two runs' accuracies that chance explains (95 %), and whether seeds set it; None where nothing
    was measured.

    Args:
        experiments: Of one environment.
    """
    figures = {run: one for entry in experiments for run, one in entry.figures.items()}
    measured = [one for one in figures.values() if one.accuracy is not None and one.tasks]
    if not measured:
        return None
    best = max(measured, key=lambda one: one.accuracy or 0.0)
    share, tasks = best.accuracy or 0.0, min(one.tasks or 1 for one in measured)
    # At a share of 0 or 1 the normal form is empty; half a success is added to both sides (Agresti and Coull 1998).
    share = (share * tasks + 0.5) / (tasks + 1)
    by_tasks = _Z * math.sqrt(2 * share * (1 - share) / tasks)
    alike: dict[str, list[float]] = defaultdict(list)
    for one in measured:
        if one.configuration:
            alike[one.configuration].append(one.accuracy or 0.0)
    repeated = [values for values in alike.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in repeated)
    if not freedom:
        return by_tasks, False
    variance = sum(statistics.variance(values) * (len(values) - 1) for values in repeated) / freedom
    by_seeds = t_quantile(0.975, freedom) * math.sqrt(2 * variance)
    return max(by_tasks, by_seeds), by_seeds > by_tasks


def plateau(experiments: Sequence[Experiment], count: int = 3) -> Plateau | None:
    """How the last experiments of an environment compare with those before; None where too few were measured.

    Args:
        experiments: Of one environment, in any order.
        count: How many are the last ones.
    """
    measured = sorted((one for one in experiments if one.accuracy is not None), key=lambda one: (one.at, one.id))
    floor = noise_floor(measured)
    if len(measured) <= count or floor is None:
        return None
    before, since = measured[:-count], measured[-count:]
    best_before = max(one.accuracy or 0.0 for one in before)
    best_since = max(one.accuracy or 0.0 for one in since)
    return Plateau(
        environment=measured[-1].environment,
        count=count,
        best_before=best_before,
        best_since=best_since,
        floor=floor[0],
        from_seeds=floor[1],
        stands=best_since - best_before <= floor[0],
    )
