"""Per-environment metrics of a step, for runs that train on several environments.

Names follow TRL's for the whole step: `environments/<label>/reward`, `/success`, `/frac_reward_zero_std`, `/errors` and
`/errors_share` over the groups delivered for the step, and `/share`, the share of groups trained over the last steps.
An environment without a group in a step reports its share alone.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence

from toprope.records.journal.groups import Group, comparisons

_WINDOW = 50
"""Steps over which shares are counted."""


def rollout_rewards(group: Group) -> list[float]:
    """One reward per rollout of the group; rows that are segments of one rollout share it."""
    if group.outcomes is not None:
        return [outcome.reward for outcome in group.outcomes]
    return list(group.scores)


def judged_rewards(group: Group) -> list[float]:
    """As `rollout_rewards`, without rollouts whose judge failed."""
    if group.outcomes is not None:
        return [outcome.reward for outcome in group.outcomes if not outcome.unjudged]
    return list(group.scores)


def has_equal_rewards(group: Group) -> bool:
    """True if rewards that are compared with each other are equal: no signal for group-relative advantages."""
    rewards = rollout_rewards(group)
    sets = [[rewards[peer] for peer in peers] for _, peers in comparisons(group.outcomes or ())] or [rewards]
    return all(max(compared) - min(compared) < 1e-9 for compared in sets)


class EnvironmentMetrics:
    """Computes the metrics of each environment.

    Args:
        labels: Labels of all environments of the run; a single environment has no metrics of its own.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = list(labels) if len(labels) > 1 else []
        self._trained: deque[Counter[str]] = deque(maxlen=_WINDOW)

    def add_step(self, delivered: Sequence[Group], trained: Sequence[Group]) -> dict[str, float]:
        """Metrics of a step.

        Args:
            delivered: All groups delivered for the step.
            trained: Those of them that are trained on.
        """
        if not self._labels:
            return {}
        self._trained.append(Counter(group.environment or "" for group in trained))
        counts: Counter[str] = Counter()
        for step in self._trained:
            counts.update(step)
        total = sum(counts.values()) or 1
        metrics: dict[str, float] = {}
        for label in self._labels:
            prefix = f"environments/{label}"
            metrics[f"{prefix}/share"] = counts[label] / total
            groups = [group for group in delivered if group.environment == label]
            if not groups:
                continue
            rewards = [reward for group in groups for reward in judged_rewards(group)]
            metrics[f"{prefix}/reward"] = statistics.fmean(rewards) if rewards else 0.0
            metrics[f"{prefix}/frac_reward_zero_std"] = sum(map(has_equal_rewards, groups)) / len(groups)
            outcomes = [outcome for group in groups for outcome in group.outcomes or []]
            if outcomes:
                judged = sum(not outcome.unjudged for outcome in outcomes)
                metrics[f"{prefix}/success"] = sum(outcome.success for outcome in outcomes) / max(1, judged)
                errors = sum(outcome.error is not None for outcome in outcomes)
                metrics |= {f"{prefix}/errors": float(errors), f"{prefix}/errors_share": errors / len(outcomes)}
        return metrics
