"""What a step shows of each environment by itself, where a run trains on several.

The names follow TRL's for the whole: `environments/<label>/reward`, `/success`, `/frac_reward_zero_std`, `/errors` over
what was delivered for the step, and `/share`, of the groups that were trained over the last steps. An environment that
had no group in a step has its share alone.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence

from toprope.records.journal.groups import Group

__all__ = ["Several", "is_flat", "rewards_of"]

_WINDOW = 50
"""Steps over which shares are counted."""


def rewards_of(group: Group) -> list[float]:
    """One reward per rollout of the group (rows that are segments of one rollout share it)."""
    if group.outcomes is not None:
        return [outcome.reward for outcome in group.outcomes]
    return list(group.scores)


def is_flat(group: Group) -> bool:
    """Whether all its rewards are equal: no signal for group-relative advantages."""
    rewards = rewards_of(group)
    return max(rewards) - min(rewards) < 1e-9


class Several:
    """The numbers of a run's environments.

    Args:
        labels: Of all of them; of one alone there is nothing to tell.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = list(labels) if len(labels) > 1 else []
        self._trained: deque[Counter[str]] = deque(maxlen=_WINDOW)

    def numbers(self, seen: Sequence[Group], kept: Sequence[Group]) -> dict[str, float]:
        """The numbers of a step.

        Args:
            seen: Everything that was delivered for it.
            kept: What of it is trained.
        """
        if not self._labels:
            return {}
        self._trained.append(Counter(group.environment or "" for group in kept))
        trained: Counter[str] = Counter()
        for one in self._trained:
            trained.update(one)
        total = sum(trained.values()) or 1
        found: dict[str, float] = {}
        for label in self._labels:
            name = f"environments/{label}"
            found[f"{name}/share"] = trained[label] / total
            own = [group for group in seen if group.environment == label]
            if not own:
                continue
            found[f"{name}/reward"] = statistics.fmean(reward for group in own for reward in rewards_of(group))
            found[f"{name}/frac_reward_zero_std"] = sum(map(is_flat, own)) / len(own)
            outcomes = [outcome for group in own for outcome in group.outcomes or []]
            if outcomes:
                found[f"{name}/success"] = sum(outcome.success for outcome in outcomes) / len(outcomes)
                found[f"{name}/errors"] = float(sum(outcome.error is not None for outcome in outcomes))
        return found
