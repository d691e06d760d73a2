"""The held-out tasks of a run, whose texts are shown and exported nowhere."""

from __future__ import annotations

from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json

_EVALUATIONS = ("before", "after")
_SEALED = "heldout"


def heldout_tasks(folder: RunFolder) -> frozenset[str]:
    """Return the ids of tasks that the run's evaluations held out. An outside environment may post groups of them."""
    found: set[str] = set()
    for label in _EVALUATIONS:
        try:
            evaluation = read_json(folder.evaluation(label))
            for measured in evaluation.values():
                if isinstance(measured, dict) and measured.get("split", _SEALED) == _SEALED:
                    by_task = measured.get("by_task", {})
                    found.update(by_task.get("tasks", ()), by_task.get("unjudged", ()))
        except (NotFound, Corrupt, AttributeError, TypeError):
            continue
    return frozenset(found)
