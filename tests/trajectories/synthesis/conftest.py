"""Made-up texts, and items with them."""

from __future__ import annotations

import random

from toprope.trajectories.items import TrajectoryItem

WORDS = [f"{a}{b}{c}{d}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst" for d in "aeiou"]


def texts(count: int, length: int = 12, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=length)) for _ in range(count)]


def items(states: list[str]) -> list[TrajectoryItem]:
    return [TrajectoryItem(state, "yes", 1.0) for state in states]
