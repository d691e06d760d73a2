"""A task of several turns that the embedded policy can learn, for `make bench-ppo`.

Written as a user would write it; the benchmark puts it into an owner's folder.
"""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task


class HintedSpelling(Environment):
    """Spell a string backward; after a wrong answer one more letter of the right one is shown for the next try."""

    name = "hinted_spelling"
    tags = ("multi-turn",)
    max_turns = 3
    parts = {
        "solved": Part(weight=1.0, description="1 when an answer was exactly right"),
        "economy": Part(weight=0.2, description="share of the tries that were left over when it was"),
    }

    def tasks(self) -> Iterator[Task]:
        while True:
            word = "".join(self.random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.random.randint(3, 4)))
            # The embedded policy knows the words of the prompt; it learns the task from reward.
            yield Task(f"Spell this word backward (example: sun -> nus): {word}", reference=word[::-1])

    def reset(self, task: Task) -> str:
        self.solved = False
        return task.prompt

    def step(self, text: str) -> tuple[str | None, bool]:
        if text.strip() == self.task.reference:
            self.solved = True
            return None, True
        return self.task.reference[: self.turns], False

    def score(self) -> dict[str, float]:
        left = (self.max_turns - self.turns) / self.max_turns
        return {"solved": float(self.solved), "economy": left if self.solved else 0.0}

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["solved"] == 1.0
