"""Bounds of rewards, with room for rounding."""

from __future__ import annotations

from typing import Any

from toprope.sdk.authoring.environment import Part, finite, is_finite
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError

__all__ = ["TOLERANCE", "Bounds", "bounds_of", "within"]

TOLERANCE = 1e-6
"""Sums and means of rewards are rounded."""


def within(value: float, low: float, high: float) -> float | None:
    """Return a value, or the bound that it exceeds by no more than rounding; None if it is outside."""
    below, above = (TOLERANCE * max(1.0, abs(bound)) for bound in (low, high))
    return min(max(value, low), high) if low - below <= value <= high + above else None


def bounds_of(knobs: Any, low: float, high: float) -> tuple[float, float]:
    """Return the knobs `reward_low` and `reward_high`, with these bounds in place of null.

    Raises:
        InvalidRequest: The smallest is not below the largest.
    """
    low = low if knobs.reward_low is None else knobs.reward_low
    high = high if knobs.reward_high is None else knobs.reward_high
    if low >= high:
        raise InvalidRequest(f"reward_low {low:g} must be below reward_high {high:g}.")
    return low, high


class Bounds:
    """Bounds of a user's reward.

    Args:
        given: `[low, high]`; None for 0 to 1.
        clip: Clip values outside instead of failing the rollout.
        key: Its name, for messages.
        place: The place of the key, for messages.

    Raises:
        LoadError: Not two finite numbers.
    """

    def __init__(self, given: Any, clip: bool, key: str, place: str = "in the target") -> None:
        pair = [0.0, 1.0] if given is None else given
        numbers = isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_finite, pair))
        if not numbers or pair[0] >= pair[1]:
            raise LoadError(f"{key} must be [low, high], two finite numbers, not {given!r}.")
        self.low, self.high = float(pair[0]), float(pair[1])
        self.clip, self._key, self._place = bool(clip), key, place

    def part(self, weight: float, description: str) -> Part:
        """Return the reward part with these bounds."""
        return Part(weight, self.low, self.high, description)

    def value(self, given: Any, whose: str) -> float:
        """Return the value as a number within the bounds.

        Raises:
            EnvironmentMistake: Not a finite number, or outside the bounds without `clip`.
        """
        number = finite(given, f"{whose} gave")
        if self.clip:
            return min(max(number, self.low), self.high)
        if (bounded := within(number, self.low, self.high)) is None:
            raise EnvironmentMistake(
                f"{whose} gave {number:g}, beyond {self.low:g} to {self.high:g}: declare {self._key}: [low, high], or "
                f"`clip`: true, {self._place}."
            )
        return bounded
