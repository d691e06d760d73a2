"""The training tasks that a run has used, by environment: mixture.json in its folder, and one more for each further
driver.

Tasks are numbered. Groups that were skipped or failed have used a number, too, so these are more than the groups that
were accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json

USED_TASKS_VERSION = 1


def used_tasks_file(folder: RunFolder, driver: int) -> Path:
    """Return the file of a driver, the first of which has number 1."""
    return folder.path / ("mixture.json" if driver == 1 else f"mixture-{driver}.json")


def ended_groups(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers in the content of such a file: the groups that a driver ended, by environment.

    Raises:
        KeyError, AttributeError, TypeError, ValueError: It is no such content.
    """
    ended = state["ended" if "ended" in state else "posted"]  # earlier versions counted posted groups only
    return {label: int(number) for label, number in ended.items()}


def read_used_tasks(folder: RunFolder, drivers: int) -> Counter[str]:
    """Return how many tasks a run and those that it continues have used, by environment; empty if that is unknown."""
    used: Counter[str] = Counter()
    try:
        for driver in range(1, drivers + 1):
            used.update(ended_groups(read_json(used_tasks_file(folder, driver), USED_TASKS_VERSION)))
    except (NotFound, Corrupt, KeyError, AttributeError, TypeError, ValueError):
        return Counter()
    return used
