"""Runs as people name them: a whole id, its beginning, or its last part; and what the shell completes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from toprope.errors import InvalidValue, TopropeError
from toprope.records.run.folder import RUN_ID
from toprope.settings.owner import Home
from toprope.workbench.launch.seeds import members

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_SHOWN = 5


def find_run(workshop: Workshop, given: str) -> str:
    """Return the id of the run or the seed group that somebody means.

    Args:
        given: An id, the beginning of one, or its last part (`k7f3`).

    Returns:
        The id; what was given if no run is meant, so that the next look-up names the nearest.

    Raises:
        InvalidValue: Several runs are meant.
    """
    runs, run_ids = workshop.home.runs, _run_ids(workshop.home)
    if not given or given in run_ids or members(runs, given):
        return given
    matches = [name for name in run_ids if name.startswith(given)] or [
        name for name in run_ids if name.endswith(f"-{given}")
    ]
    if len(matches) > 1:
        latest = ", ".join(matches[-_SHOWN:][::-1])
        raise InvalidValue(f"{given} is the beginning of {len(matches)} runs.", hint=f"The latest: {latest}.")
    return matches[0] if matches else given


def find_checkpoint(workshop: Workshop, given: str) -> str:
    """Return `RUN` or `RUN@STEP` with the run's whole id. Raises: see `find_run`."""
    run, at, step = given.partition("@")
    return f"{find_run(workshop, run)}{at}{step}"


def complete_run(incomplete: str) -> list[str]:
    """The runs for the shell's completion."""
    try:
        return [name for name in _run_ids(Home.locate()) if name.startswith(incomplete)]
    except TopropeError:
        return []


def complete_component(incomplete: str) -> list[str]:
    """The components for the shell's completion."""
    from toprope_tools.runs.logs import COMPONENTS

    return [name for name in COMPONENTS if name.startswith(incomplete)]


def complete_environment(incomplete: str) -> list[str]:
    """The environments for the shell's completion."""
    from toprope_tools.workshop import Workshop

    try:
        entries = Workshop.open().catalog.entries()
    except TopropeError:
        return []
    return [entry.name for entry in entries if entry.name.startswith(incomplete)]


def _run_ids(home: Home) -> list[str]:
    try:
        return sorted(name for name in os.listdir(home.runs) if RUN_ID.fullmatch(name))
    except OSError:
        return []
