"""A task that a policy of one table learns: answer with small letters."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task


class Letters(Environment):
    """Answer with small letters."""

    name = "letters"
    parts = {"share": Part(weight=1.0, description="share of small letters among four characters")}

    def tasks(self) -> Iterator[Task]:
        for number in range(100_000):
            yield Task(f"{number}", reference="aaaa")

    def score(self) -> dict[str, float]:
        return {"share": sum(one in "abcdefghijklmnopqrstuvwxyz" for one in self.answer) / max(len(self.answer), 4)}

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["share"] >= 0.5
