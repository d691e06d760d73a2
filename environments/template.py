"""A template: one environment in one file. Copy it, rename the class, and write your own tasks and scoring."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task, knob


class SortLetters(Environment):
    """Put the letters of a jumbled word in alphabetical order."""

    # The name in `list_environments`; by default the name of the file.
    name = "sort_letters"
    tags = ("strings", "single-turn")

    # The reward is the sum of weight times value. A part of weight 0 is reported and not rewarded.
    # Partial credit helps a weak policy to start; `success` below decides which rollouts count as solved.
    parts = {
        "letters": Part(weight=0.5, description="share of the places that hold the right letter"),
        "exact": Part(weight=0.5, description="1 when the whole answer is right"),
    }

    # Settings of a run. Values are checked against type and bounds before your code sees them.
    class Knobs:
        shortest: int = knob(3, ge=2, le=26, help="fewest letters")
        longest: int = knob(5, ge=2, le=26, help="most letters")
        alphabet: str = knob("abcdefghijklmnopqrstuvwxyz", help="letters that can occur")

        def __post_init__(self) -> None:
            if self.shortest > self.longest:
                raise ValueError(f"shortest ({self.shortest}) exceeds longest ({self.longest})")
            if len(set(self.alphabet)) < 2:
                raise ValueError("alphabet needs at least two letters")

    # All tasks, finite or endless. `self.random` gives the same numbers in every run, so the tasks are the same too.
    # Splits are made for you by the text of the tasks, and held-out tasks are never trained on.
    def tasks(self) -> Iterator[Task]:
        while True:
            length = self.random.randint(self.knobs.shortest, self.knobs.longest)
            letters = "".join(self.random.choice(self.knobs.alphabet) for _ in range(length))
            yield Task(f"Sort these letters: {letters}", reference="".join(sorted(letters)))

    # Called when the rollout is done, with its task in `self.task` and the last answer in `self.answer`.
    def score(self) -> dict[str, float]:
        right, answer = self.task.reference, self.answer.strip()
        hits = sum(a == b for a, b in zip(answer, right, strict=False))
        return {"letters": hits / max(len(right), len(answer)), "exact": float(answer == right)}

    # True counts the rollout as solved. The default is the same: the highest possible reward.
    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["exact"] == 1.0
