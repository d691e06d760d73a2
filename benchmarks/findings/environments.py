"""Small tasks for the embedded policy, sound ones and faulty ones, for `make bench-findings`.

A file of environments as a user would write it; the faulty ones hold mistakes that users make.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task, knob

_ORDERS = {
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "rotate": lambda word: word[1:] + word[:1],
    "swap": lambda word: word[-1] + word[1:-1] + word[0],
    "copy": lambda word: word,
}


class Letters(Environment):
    """Put the letters of a string into another order."""

    name = "letters"

    class Knobs:
        order: str = knob("reverse", help=f"one of {', '.join(_ORDERS)}")
        shortest: int = knob(3, ge=2, le=12, help="fewest letters")
        longest: int = knob(4, ge=2, le=12, help="most letters")
        places: bool = knob(False, help="credit for each letter in its place instead of whole answers only")
        after: int = knob(0, ge=0, help="answers scored before what is wrong with it goes wrong")

    def setup(self) -> None:
        self.scored = [0]  # one list for all rollouts, which are shallow copies

    def tasks(self) -> Iterator[Task]:
        order = _ORDERS[self.knobs.order]
        while True:
            length = self.random.randint(self.knobs.shortest, self.knobs.longest)
            word = "".join(self.random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
            # The embedded policy was warmed up with this phrase; it learns the task from reward alone.
            yield Task(f"Spell this word backward (example: sun -> nus): {word}", reference=order(word))

    def score(self) -> dict[str, float]:
        self.scored[0] += 1
        if self.scored[0] > self.knobs.after:
            return {"score": self.sick()}
        return {"score": self.sound()}

    def sound(self) -> float:
        right, answer = self.task.reference, self.answer.strip()
        if not self.knobs.places:
            return float(answer == right)
        return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(right), len(answer), 1)

    def sick(self) -> float:
        return self.sound()


class Raises(Letters):
    """Its scorer raises on most answers."""

    name = "raises"

    def sick(self) -> float:
        words = {"a": 0.0, "e": 1.0}
        return words[self.answer.strip()[:1]]


class NotANumber(Letters):
    """Its scorer divides zero by zero."""

    name = "not_a_number"

    def sick(self) -> float:
        return float("nan")


class Constant(Letters):
    """Its scorer gives half a point to every answer."""

    name = "constant"

    def sick(self) -> float:
        return 0.5


class ByTask(Letters):
    """Its scorer looks at the task and never at the answer."""

    name = "by_task"

    def sick(self) -> float:
        return random.Random(self.task.reference).uniform(0.1, 0.9)


class Impossible(Letters):
    """No answer that the policy can give is right."""

    name = "impossible"

    def sick(self) -> float:
        return float(self.answer.strip() == f"The answer is {self.task.reference}, as a sentence.")


class Everything(Letters):
    """Every answer is right."""

    name = "everything"

    def sick(self) -> float:
        return 1.0


class Easy(Letters):
    """An answer is right as soon as a letter of the word occurs in it."""

    name = "easy"

    def sick(self) -> float:
        return float(any(letter in self.answer for letter in self.task.reference or ""))


class Explodes(Letters):
    """Its reward is practically unbounded."""

    name = "explodes"
    parts = {"score": Part(low=0.0, high=3e38)}  # noqa: RUF012

    def sick(self) -> float:
        return 3e38 * super().sick()

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return reward > 0.5


class Hangs(Letters):
    """Its scorer waits for an event that never comes."""

    name = "hangs"

    def sick(self) -> float:
        time.sleep(3600)
        return 0.0
