"""A multi-turn game that a very small policy can learn: guess a number by halving a range.

The hidden number must not be in the prompt, but tasks are told apart by their prompts. Therefore every task has its own
range, and the range determines the number.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task, knob


class NumberGuess(Environment):
    """Guess a hidden whole number from answers of higher and lower."""

    name = "number_guess"
    tags = ("games", "multi-turn")
    max_turns = 6
    parts = {
        "solved": Part(weight=1.0, description="1 when the number was guessed"),
        "economy": Part(weight=0.2, description="share of the guesses left over when it was guessed"),
    }

    class Knobs:
        largest: int = knob(200, ge=9, le=1_000_000, help="largest number that occurs")
        widest: int = knob(16, ge=2, le=1_000_000, help="most numbers in a range")
        spare: int = knob(1, ge=0, le=20, help="guesses beyond what halving needs at worst")

        def __post_init__(self) -> None:
            if self.widest > self.largest:
                raise ValueError(f"widest ({self.widest}) exceeds largest ({self.largest})")

    def setup(self) -> None:
        self.max_turns = self.knobs.widest.bit_length() + self.knobs.spare

    def tasks(self) -> Iterator[Task]:
        while True:
            width = self.random.randint(2, self.knobs.widest)
            low = self.random.randint(1, self.knobs.largest - width + 1)
            high = low + width - 1
            hidden = random.Random(f"{low}-{high}").randint(low, high)
            yield Task(f"Guess my number from {low} to {high}.", reference=str(hidden), data={"hidden": hidden})

    def reset(self, task: Task) -> str:
        self.solved = False
        return task.prompt

    def step(self, text: str) -> tuple[str, bool]:
        guess, hidden = re.search(r"\d{1,9}", text), self.task.data["hidden"]
        if guess is None:
            return "Say a number.", False
        if int(guess.group()) == hidden:
            self.solved = True
            return "Right.", True
        return ("Higher." if hidden > int(guess.group()) else "Lower."), False

    def score(self) -> dict[str, float]:
        left = (self.max_turns - self.turns) / self.max_turns
        return {"solved": float(self.solved), "economy": left if self.solved else 0.0}

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["solved"] == 1.0
