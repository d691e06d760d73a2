"""Tasks that are the entries of a data set of reasoning-gym, and their rewards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from toprope.sdk.authoring.environment import Environment, Part, Task
from toprope.sdk.authoring.knobs import knob
from toprope.sdk.tooled import split_thoughts

__all__ = ["SEED", "EntryEnvironment", "parts_of", "scoring"]

SEED = 0
"""The seed of every data set; see `toprope.sdk.adapters.reasoning_gym`."""
_WEIGHTS = {"exact": (1.0, 0.0), "partial": (0.0, 1.0), "both": (0.5, 0.5)}


class EntryEnvironment(Environment):
    """Environment whose tasks are the entries of `self._dataset`, a data set of reasoning-gym."""

    packages = ("reasoning-gym",)
    _dataset: Any = None
    _most_gaps = 0
    """Most numbers in a row without an entry, before the end; a member of a mixture may end before others."""

    def tasks(self) -> Iterator[Task]:
        gaps = 0
        for index in itertools.count():
            try:
                entry = self._dataset[index]
            except IndexError:  # some tasks generate a fixed number in advance
                if index < len(self._dataset):
                    raise
                gaps += 1
                if gaps > self._most_gaps:
                    return
                continue
            gaps = 0
            yield Task(str(entry["question"]), reference=entry["answer"], data={"entry": entry})

    def score(self) -> dict[str, float]:
        value = float(self._dataset.score_answer(split_thoughts(self.answer)[1].strip(), self.task.data["entry"]))
        return {"exact": float(value >= 1.0), "partial": min(max(value, 0.0), 1.0)}

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["exact"] >= 1.0


def parts_of(scoring: str) -> dict[str, Part]:
    """Return the reward parts for a value of the knob `scoring`."""
    exact, partial = _WEIGHTS[scoring]
    return {
        "exact": Part(exact, description="1 when reasoning-gym calls the answer entirely right"),
        "partial": Part(partial, description="reasoning-gym's own score, with its partial credit"),
    }


def scoring() -> tuple[str, Any, Any]:
    """Return the field of the knob `scoring`."""
    help_text = "what is rewarded: right answers alone, reasoning-gym's own score, or half of each"
    return "scoring", Literal["exact", "partial", "both"], knob("partial", help=help_text)
