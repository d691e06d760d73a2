"""An environment of `make bench-findings`: the first letter moves to the end, whole answers count."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Task


class RotatedLetters(Environment):
    """Move the first letter of a string to its end."""

    name = "rotated_letters"

    def tasks(self) -> Iterator[Task]:
        while True:
            word = "".join(self.random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.random.randint(3, 4)))
            # The embedded policy answers letters of the question after this phrase; it learns the order from reward.
            yield Task(f"Spell this word backward (example: sun -> nus): {word}", reference=word[1:] + word[:1])

    def score(self) -> dict[str, float]:
        return {"score": float(self.answer.strip() == self.task.reference)}
