"""Schedules environments so that their shares hold from the first groups on.

The schedule is smooth weighted round-robin: at every turn each environment gains credit by its share, and the one with
the most credit is chosen and pays one. After any number of groups each has been chosen within two of its share, if
groups end in the order in which they began (Tijdeman, The chairman assignment problem, 1980, has the bound of one that
other schedules keep). Nothing is random; the seed decides ties.

Three rules change the shares. Credit ends at `_MAX_CREDIT`, so an environment whose groups take longer falls behind
for good, and the others do not wait for it. An environment that falls below its `min_share` of the trained groups (its
groups carry no signal, or are too old) is chosen more often, at most until the others have half their share. And a slow
environment may occupy only so many of the groups in progress that the others can continue; they continue until the slow
one would fall below its `min_share`, then they wait.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WINDOW = 240
"""Groups over which a minimum share holds."""
_FACTOR_STEP, _MAX_FACTOR = 1.25, 16.0
_MAX_CREDIT = 2.0


@dataclass(frozen=True)
class MixtureEntry:
    """One environment's part: `weight` relative to the others' weights, `min_share` of all groups."""

    label: str
    weight: float = 1.0
    min_share: float = 0.0


def mixture_shares(entries: Sequence[MixtureEntry], factors: Mapping[str, float] | None = None) -> dict[str, float]:
    """Shares that add up to 1: by weight, but none below its minimum.

    Args:
        entries: Environments whose minimum shares add up to at most 1.
        factors: Multipliers of the weights, by label.
    """
    weights = {entry.label: entry.weight * (factors or {}).get(entry.label, 1.0) for entry in entries}
    low = {entry.label: entry.min_share for entry in entries}
    at_minimum: set[str] = set()
    while True:
        remaining = 1.0 - sum(low[label] for label in at_minimum)
        total = sum(weight for label, weight in weights.items() if label not in at_minimum)
        shares = {
            label: low[label] if label in at_minimum else remaining * weight / total
            for label, weight in weights.items()
        }
        below = {label for label, share in shares.items() if label not in at_minimum and share < low[label] - 1e-12}
        if not below:
            return shares
        at_minimum |= below
        if len(at_minimum) == len(weights):  # the minimum shares add up to 1
            return dict(low)


class MixtureScheduler:
    """The order of environments in one run.

    Args:
        entries: The environments.
        places: Groups in progress at the same time.
        seed: Decides ties.
    """

    def __init__(self, entries: Sequence[MixtureEntry], *, places: int = 1, seed: int = 0) -> None:
        self._entries = {entry.label: entry for entry in entries}
        self._targets = self._shares = mixture_shares(entries)
        self._places = places
        order = sorted(self._entries)
        random.Random(seed).shuffle(order)
        self._rank = {label: -place for place, label in enumerate(order)}
        self._credit = dict.fromkeys(self._entries, 0.0)
        self._in_progress: Counter[str] = Counter()
        self._recent: deque[str] = deque(maxlen=_WINDOW)
        self._factors = dict.fromkeys(self._entries, 1.0)

    @property
    def shares(self) -> dict[str, float]:
        """Current shares of the groups that are begun, by label."""
        return dict(self._shares)

    def choose(self) -> str | None:
        """Label of the environment whose group begins next; None if all must wait until a group is finished."""
        for label, share in self._shares.items():
            self._credit[label] = min(self._credit[label] + share, _MAX_CREDIT)
        ranked = sorted(self._entries, key=lambda label: (-self._credit[label], -self._rank[label]))
        for label in ranked:
            if self._in_progress[label] < self._limit(label) and (label == ranked[0] or self._may_precede(label)):
                self._credit[label] -= 1.0
                self._in_progress[label] += 1
                self._recent.append(label)
                return label
        for label, share in self._shares.items():
            self._credit[label] -= share  # this turn does not count
        return None

    def finish(self, label: str, *, counts: bool = True) -> None:
        """Ends a group in progress; `counts` is False if its turn should be given back."""
        self._in_progress[label] -= 1
        if not counts:
            self._credit[label] = min(self._credit[label] + 1.0, _MAX_CREDIT)
            if label in self._recent:
                self._recent.remove(label)

    def adjust(self, trained: Mapping[str, float]) -> None:
        """Adjusts the shares so that environments below their minimum are chosen more often.

        Args:
            trained: Shares of the groups trained lately, by label; a missing label had none.
        """
        for label, entry in self._entries.items():
            lacks = entry.min_share > 0 and trained.get(label, 0.0) < entry.min_share
            factor = self._factors[label] * (_FACTOR_STEP if lacks else 1 / _FACTOR_STEP)
            self._factors[label] = min(max(factor, 1.0), _MAX_FACTOR)
        desired = mixture_shares(list(self._entries.values()), self._factors)
        # Every environment keeps at least half of its share, whatever another one lacks.
        entries = [
            MixtureEntry(label, max(desired[label], 1e-9), max(self._targets[label] / 2, entry.min_share))
            for label, entry in self._entries.items()
        ]
        if sum(entry.min_share for entry in entries) <= 1.0:
            self._shares = mixture_shares(entries)

    def state(self) -> dict[str, dict[str, float]]:
        """Everything that decides the order from here on, as JSON values."""
        return {"credit": dict(self._credit), "factors": dict(self._factors), "shares": dict(self._shares)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continues from a `state`.

        Raises:
            KeyError: It belongs to other environments.
        """
        restored = {name: {label: float(state[name][label]) for label in self._entries} for name in self.state()}
        self._credit, self._factors, self._shares = restored["credit"], restored["factors"], restored["shares"]

    def _limit(self, label: str) -> int:
        """Groups of an environment that may be in progress, so that the others have room."""
        reserved = sum(max(1, int(self._places * share / 2)) for other, share in self._shares.items() if other != label)
        return max(1, self._places - reserved)

    def _may_precede(self, label: str) -> bool:
        """True if no other environment falls below its minimum if this one is chosen before its turn."""
        recent = Counter(self._recent)
        total = len(self._recent) + 1
        return all(
            other == label or recent[other] + 1 >= entry.min_share * total for other, entry in self._entries.items()
        )
