"""Which environment's group is made next, so that shares hold from the first groups on.

The choice is smooth weighted round-robin: everybody gains credit by its share at every turn, the one with most plays
and pays one. After any number of groups each has been chosen within one of its share (Tijdeman, The chairman assignment
problem, 1980, on how evenly such sequences can be spread). Nothing is drawn by chance; the seed decides ties.

Two things bend the shares. Who falls below its `min_share` of what was trained (its groups carry no signal, or are too
old) is chosen more often, at most until the others have half their share. And a slow environment keeps only so many
groups in the making that the others can go on; they go on until it would fall below its `min_share`, then they wait.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Claim", "Mixer", "shares"]

_WINDOW = 240
"""Groups over which a minimum share holds."""
_STEP, _MOST = 1.25, 16.0
_LONGEST_CREDIT = 2.0


@dataclass(frozen=True)
class Claim:
    """What one environment is to have: `weight` relative to the others', `min_share` of all."""

    label: str
    weight: float = 1.0
    min_share: float = 0.0


def shares(claims: Sequence[Claim], factors: Mapping[str, float] | None = None) -> dict[str, float]:
    """Shares that add up to 1: by weight, but nobody below its minimum.

    Args:
        claims: With minimum shares that add up to at most 1.
        factors: What weights are multiplied with, by label.
    """
    weights = {one.label: one.weight * (factors or {}).get(one.label, 1.0) for one in claims}
    low = {one.label: one.min_share for one in claims}
    held: set[str] = set()
    while True:
        rest = 1.0 - sum(low[label] for label in held)
        total = sum(weight for label, weight in weights.items() if label not in held)
        found = {label: low[label] if label in held else rest * weight / total for label, weight in weights.items()}
        below = {label for label, share in found.items() if label not in held and share < low[label] - 1e-12}
        if not below:
            return found
        held |= below
        if len(held) == len(weights):  # they add up to 1 then
            return dict(low)


class Mixer:
    """The order of environments in one run.

    Args:
        claims: The environments.
        places: How many groups are made at the same time.
        seed: Decides ties.
    """

    def __init__(self, claims: Sequence[Claim], *, places: int = 1, seed: int = 0) -> None:
        self._claims = {one.label: one for one in claims}
        self._targets = self._shares = shares(claims)
        self._places = places
        order = sorted(self._claims)
        random.Random(seed).shuffle(order)
        self._rank = {label: -place for place, label in enumerate(order)}
        self._credit = dict.fromkeys(self._claims, 0.0)
        self._making: Counter[str] = Counter()
        self._recent: deque[str] = deque(maxlen=_WINDOW)
        self._factors = dict.fromkeys(self._claims, 1.0)

    @property
    def shares(self) -> dict[str, float]:
        """The shares of groups that are begun now, by label."""
        return dict(self._shares)

    def take(self) -> str | None:
        """Whose group is begun now; None: those that may are waited for until one of theirs is `done`."""
        for label, share in self._shares.items():
            self._credit[label] = min(self._credit[label] + share, _LONGEST_CREDIT)
        ranked = sorted(self._claims, key=lambda label: (-self._credit[label], -self._rank[label]))
        first = ranked[0]
        for label in ranked:
            if self._making[label] < self._room(label) and (label == first or self._may_go_ahead(label)):
                self._credit[label] -= 1.0
                self._making[label] += 1
                self._recent.append(label)
                return label
        for label, share in self._shares.items():
            self._credit[label] -= share  # this turn does not count
        return None

    def done(self, label: str, *, counts: bool = True) -> None:
        """A group is no longer in the making. `counts`: it was played; else its turn is given back."""
        self._making[label] -= 1
        if not counts:
            self._credit[label] = min(self._credit[label] + 1.0, _LONGEST_CREDIT)
            if label in self._recent:
                self._recent.remove(label)

    def trained(self, found: Mapping[str, float]) -> None:
        """Shares of the groups that were trained lately; who lacks its minimum is chosen more often from now on.

        Args:
            found: By label; who is not in it had none.
        """
        for label, claim in self._claims.items():
            lacks = claim.min_share > 0 and found.get(label, 0.0) < claim.min_share
            factor = self._factors[label] * (_STEP if lacks else 1 / _STEP)
            self._factors[label] = min(max(factor, 1.0), _MOST)
        wanted = shares(list(self._claims.values()), self._factors)
        # The others keep at least half of what is theirs, whatever one environment lacks.
        least = {label: share / 2 for label, share in self._targets.items()}
        claims = [Claim(label, max(wanted[label], 1e-9), max(least[label], claim.min_share))
                  for label, claim in self._claims.items()]  # fmt: skip
        if sum(one.min_share for one in claims) <= 1.0:
            self._shares = shares(claims)

    def state(self) -> dict[str, dict[str, float]]:
        """What decides the order from here on, as JSON has it."""
        return {"credit": dict(self._credit), "factors": dict(self._factors), "shares": dict(self._shares)}

    def take_up(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Goes on from a `state`.

        Raises:
            KeyError: It is of other environments.
        """
        found = {name: {label: float(state[name][label]) for label in self._claims} for name in self.state()}
        self._credit, self._factors, self._shares = found["credit"], found["factors"], found["shares"]

    def _room(self, label: str) -> int:
        """Groups of an environment that may be in the making, so that the others have room."""
        kept = sum(max(1, int(self._places * share / 2)) for other, share in self._shares.items() if other != label)
        return max(1, self._places - kept)

    def _may_go_ahead(self, label: str) -> bool:
        """Whether nobody falls below its minimum if this one is chosen before its turn."""
        recent = Counter(self._recent)
        total = len(self._recent) + 1
        return all(
            other == label or recent[other] + 1 >= claim.min_share * total for other, claim in self._claims.items()
        )
