"""Count the processes that outlive a component, by containment level and killed process: `make bench-containment`.

    python -P -m benchmarks.faults.containment

A component starts five kinds of grandchildren: a plain one, one in a session of its own, one there that ignores
SIGTERM, a daemon forked twice, and such a daemon with an empty environment. Then a process gets SIGKILL, and after the
crew has had its time the survivors of the six are counted: before a front end looks at the run, and after. Takes about
ten seconds; needs bubblewrap.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import toprope
from benchmarks.report import refuse, report
from benchmarks.scratch import scratch
from toprope.supervisor.keeper import containment
from toprope.supervisor.keeper.containment import Level
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.lock import is_held
from toprope.supervisor.runs.manager import RunManager

ROOT = Path(toprope.__file__).resolve().parent.parent

from tests.support import supervisor_stand_ins  # noqa: E402
from tests.support.run_harness import RunHarness  # noqa: E402

__all__ = ["KINDS", "WHOM", "left_over"]

KINDS = ("plain", "setsid", "deaf", "daemon", "bare")
WHOM = ("component", "keeper", "guard", "keeper and guard")
LIMIT_S = 30.0
_BROOD = """
import os, signal, sys, time
token, sleep = sys.argv[1], "import time; time.sleep(600)"
def become(kind):
    os.closerange(0, 64)
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", sleep, token, kind],
              {} if kind == "bare" else dict(os.environ))
for kind in ("plain", "setsid", "deaf", "daemon", "bare"):
    if os.fork() == 0:
        if kind != "plain":
            os.setsid()
        if kind in ("deaf", "daemon", "bare"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if kind in ("daemon", "bare") and os.fork():
            os._exit(0)
        become(kind)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def _processes(token: str) -> dict[str, psutil.Process]:
    """Return the kinds of the processes that carry the token."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if token in words and "-c" in words and "--control" not in words:
                found[words[-1] if words[-1] in KINDS else "component"] = process
        except psutil.Error:
            continue
    return found


def _until(condition: Any, limit_s: float = LIMIT_S) -> bool:
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def left_over(harness: RunHarness, level: Level, whom: str) -> tuple[list[str], list[str]]:
    """Return the survivors of the six when the lock of their run is free, and after a front end has looked.

    Args:
        harness: A harness with stand-ins; a run is started in it.
        level: Containment of its components.
        whom: One of WHOM.
    """
    token = f"{harness.token}-{level}-{whom.replace(' ', '-')}"
    programs = supervisor_stand_ins.programs({}, harness.token)
    programs["inference"] = [sys.executable, "-I", "-S", "-c", _BROOD, token]
    table = harness.path / f"{token}.json"
    table.write_text(json.dumps(programs))
    command = [sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table)]
    runs = RunManager(harness.path / "runs", LocalLauncher(command, contained=lambda: level), lambda: harness.machine)
    specification = harness.specification(stop_grace_s=0.3)
    folder = runs.start(specification)
    harness.started.append(folder)
    if not _until(lambda: len(_processes(token)) == 1 + len(KINDS)):
        raise TimeoutError(f"the component did not come up; {folder.path} has its logs")
    component, keeper = _processes(token)["component"], harness.keeper(folder)
    guard = component.parent()
    assert guard is not None
    victims = {"component": [component], "keeper": [keeper], "guard": [guard], "keeper and guard": [guard, keeper]}[
        whom
    ]
    if len(victims) > 1:
        # Both at once, before either can act on the other's end.
        for victim in victims:
            victim.suspend()
    for victim in victims:
        victim.kill()
    _until(lambda: not is_held(folder.lock))
    _until(lambda: not _processes(token), 2.0)
    before = sorted(_processes(token))
    runs.status(folder.run_id)
    _until(lambda: not _processes(token), 1.0)
    after = sorted(_processes(token))
    for process in _processes(token).values():
        process.kill()
    return before, after


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and, as the last line, the figures; exit with 1 if something is left within a namespace."""
    argparse.ArgumentParser(prog="python -P -m benchmarks.faults.containment").parse_args(arguments)
    if why := containment.probe_bubblewrap():
        return refuse(f"bubblewrap does not work here: {why}")
    levels: list[Level] = ["guard", "bubblewrap"]
    found = {}
    with scratch("containment") as path:
        harness = RunHarness(path)
        try:
            for level in levels:
                for whom in WHOM:
                    found[level, whom] = left_over(harness, level, whom)
        finally:
            harness.close()
    table = Table(title="Left over of a component and its five grandchildren, before and after a front end looks")
    table.add_column("held by")
    for whom in WHOM:
        table.add_column(f"kill {whom}")
    for level in levels:
        rows = (found[level, whom] for whom in WHOM)
        cells = [f"{len(before)} / {len(after)} {' '.join(before)}".rstrip() for before, after in rows]
        table.add_row(level, *cells)
    Console().print(table)
    figures: dict[str, Any] = {
        f"{level}_{when}": sum(len(found[level, whom][place]) for whom in WHOM)
        for level in levels
        for place, when in enumerate(("unseen", "seen"))
    }
    return report(
        "Containment",
        figures,
        # A daemon that cleared its environment, if keeper and guard are killed at the same moment (docs/faults.md).
        goals={"bubblewrap_unseen": "== 0", "guard_seen": "<= 1"},
        control="guards alone must be seen to leave something until a front end looks.",
        control_failed="" if figures["guard_unseen"] else "guards left nothing, so the kills killed nothing",
    )


if __name__ == "__main__":
    sys.exit(main())
