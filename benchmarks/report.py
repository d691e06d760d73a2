"""The end of every benchmark: a table of figures with their goals, the control, and one JSON line.

Goals are texts such as `>= 0.94`. A figure of time on the clock counts only if the machine was quiet; ratios of sides
that alternate, and processor time, count under any load.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

__all__ = ["is_met", "machine", "report", "wait_until_quiet"]

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
QUIET_LOAD = 0.6
"""Processes that may run besides a benchmark, averaged over a minute."""


def report(
    title: str,
    figures: Mapping[str, Any],
    *,
    goals: Mapping[str, str] | None = None,
    control: str = "",
    control_failed: str = "",
    timed: Iterable[str] = (),
    quiet: bool | None = None,
) -> int:
    """Print the figures, as a table and, with the goals, as JSON on the last line.

    The line also has the day, the machine, the arguments of the program, and why a control failed, so that a stored
    output is never taken for that of another day, of the whole benchmark, or of one whose control held.

    Args:
        title: Of the table.
        figures: Name -> value, as JSON takes it.
        goals: Name of a figure -> its goal, `>= 0.94`. Figures that were not measured meet none.
        control: How the figures could be won by accident, and what shows that they were not.
        control_failed: Why the control failed; empty if it held.
        timed: Names of figures that are times on the clock.
        quiet: If the machine was quiet, for `timed`; None if it was not asked.

    Returns:
        The exit status: 2 if the control failed, 1 if a goal was missed, 0 otherwise.
    """
    goals, timed = goals or {}, set(timed)
    missed = []
    table = Table("figure", title=title)
    table.add_column("value", justify="right")
    if goals:
        table.add_column("goal", justify="right")
        table.add_column("")
    for name, value in figures.items():
        cells = [name, f"{value:.4g}" if isinstance(value, float) else str(value)]
        if name in goals:
            loud = name in timed and quiet is False
            met = not loud and is_met(value, goals[name])
            cells += [goals[name], "met" if met else "not quiet" if loud else "missed"]
            missed += [] if met else [name]
        table.add_row(*cells)
    missed += [name for name in goals if name not in figures]
    console = Console()
    console.print(table)
    if control:
        print(f"control: {control}")
    if control_failed:
        print(f"control failed, so the figures prove nothing: {control_failed}")
    if missed:
        print(f"missed: {', '.join(missed)}")
    about: dict[str, Any] = {"on": time.strftime("%Y-%m-%d"), "machine": machine()}
    if sys.argv[1:]:
        about["arguments"] = " ".join(sys.argv[1:])
    if control_failed:
        about["control_failed"] = control_failed
    about["load"] = round(os.getloadavg()[0], 1)
    if quiet is not None:
        about["quiet"] = quiet
    print(json.dumps({**about, **{name: _rounded(value) for name, value in figures.items()}, "goals": dict(goals)}))
    return 2 if control_failed else 1 if missed else 0


def is_met(value: Any, goal: str) -> bool:
    """If a value meets a goal such as `<= 5`; no value meets none.

    Raises:
        KeyError: The goal has no known comparison.
    """
    sign, _, bound = goal.partition(" ")
    if value is None:
        return False
    return _COMPARISONS[sign](value, json.loads(bound))


def wait_until_quiet(load: Callable[[], float] = lambda: os.getloadavg()[0]) -> bool:
    """Wait until hardly anything else runs; False if something still does after TOPROPE_BENCH_WAIT_S (300) seconds."""
    deadline = time.monotonic() + float(os.environ.get("TOPROPE_BENCH_WAIT_S", "300"))
    while load() > QUIET_LOAD:
        if time.monotonic() > deadline:
            return False
        time.sleep(2.0)
    return True


def machine() -> str:
    """This machine in a few words."""
    gigabytes = round(psutil.virtual_memory().total / 2**30)
    return f"{os.cpu_count()} cores, {gigabytes} GB, {platform.machine()}, Python {platform.python_version()}"


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
