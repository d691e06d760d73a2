"""An environment of `make bench-findings`: letters in alphabetical order, with credit for each place."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Task


class SortedLetters(Environment):
    """Put the letters of a string in alphabetical order."""

    name = "sorted_letters"

    def tasks(self) -> Iterator[Task]:
        while True:
            word = "".join(self.random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.random.randint(3, 4)))
            # The embedded policy answers letters of the question after this phrase; it learns the order from reward.
            yield Task(f"Spell this word backward (example: sun -> nus): {word}", reference="".join(sorted(word)))

    def score(self) -> dict[str, float]:
        right, answer = self.task.reference, self.answer.strip()
        hits = sum(a == b for a, b in zip(answer, right, strict=False))
        return {"score": hits / max(len(right), len(answer), 1)}
