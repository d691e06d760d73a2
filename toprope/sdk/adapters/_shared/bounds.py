"""Bounds of rewards, with room for rounding."""

from __future__ import annotations

__all__ = ["TOLERANCE", "within"]

TOLERANCE = 1e-6
"""Sums and means of rewards are rounded."""


def within(value: float, low: float, high: float) -> float | None:
    """Return a value, or the bound that it exceeds by no more than rounding; None if it is outside."""
    slack = TOLERANCE * max(1.0, abs(low), abs(high))
    return min(max(value, low), high) if low - slack <= value <= high + slack else None
