"""A template: one plain environment in one file. Copy it, rename the class, and write your own tasks and scoring."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task, knob


class SortLetters(Environment):
    """Put the letters of a jumbled word in alphabetical order."""

    # The name that `list_environments` shows. Without it the file's name is used.
    name = "sort_letters"
    tags = ("strings", "single-turn")

    # What the reward is made of: the sum of weight times value. A part of weight 0 is shown and not rewarded.
    # Partial credit gives a beginner something to climb; `success` below says what counts as solved.
    parts = {
        "letters": Part(weight=0.5, description="share of the places that hold the right letter"),
        "exact": Part(weight=0.5, description="1 when the whole answer is right"),
    }

    # Settings that a run may change; they are checked against type and bounds before anything of yours sees them.
    class Knobs:
        shortest: int = knob(3, ge=2, le=26, help="fewest letters")
        longest: int = knob(5, ge=2, le=26, help="most letters")
        alphabet: str = knob("abcdefghijklmnopqrstuvwxyz", help="letters that may occur")

        def __post_init__(self) -> None:
            if self.shortest > self.longest:
                raise ValueError(f"shortest ({self.shortest}) exceeds longest ({self.longest})")
            if len(set(self.alphabet)) < 2:
                raise ValueError("alphabet needs two letters at least")

    # All tasks, finite or endless. `self.random` gives the same numbers in every run, so the tasks are the same too.
    # There is no need to think of splits: tasks are told apart by their text, and held-out ones are never trained on.
    def tasks(self) -> Iterator[Task]:
        while True:
            length = self.random.randint(self.knobs.shortest, self.knobs.longest)
            letters = "".join(self.random.choice(self.knobs.alphabet) for _ in range(length))
            yield Task(f"Sort these letters: {letters}", reference="".join(sorted(letters)))

    # Called once the rollout is done. `self.task` is what was asked, `self.answer` what the policy said last.
    def score(self) -> dict[str, float]:
        right, answer = self.task.reference, self.answer.strip()
        hits = sum(a == b for a, b in zip(answer, right, strict=False))
        return {"letters": hits / max(len(right), len(answer)), "exact": float(answer == right)}

    # What accuracy counts. This is the default, written out: the highest reward there is.
    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["exact"] == 1.0
