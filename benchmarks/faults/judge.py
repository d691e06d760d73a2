"""Judge a campaign of faults: what was left behind, and which runs ended as they should not.

Endings are judged by the faults of a run: a run may complete, stop because it was told to, or fail in the name of a
member that was killed. Being lost in between, or restarted members, do not count as an end.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.faults.lives import Leftovers, Ports
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import TRANSITIONS, Status, read_events
from toprope.supervisor.lock import is_held

__all__ = ["Story", "Tally", "index_errors", "look"]


@dataclass
class Story:
    """One run: its faults and its end."""

    crew: str
    strikes: list[str] = field(default_factory=list)
    """The killed processes in order: `keeper`, `api`, `the guard of trainer`, `server`, ..."""
    struck: set[str] = field(default_factory=set)
    """Members that were killed, or whose guard was."""
    stop_ordered: bool = False
    kills: int = 0
    states: list[str] = field(default_factory=list)
    resumes: int = 0
    restarts: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    rose: bool | None = None


@dataclass
class Tally(Leftovers):
    """All problems that were found."""

    wrong: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    index: list[str] = field(default_factory=list)

    @property
    def everything(self) -> list[str]:
        return [*self.leftovers, *self.wrong, *self.unaccounted, *self.index]


def look(
    harness: Path,
    folder: RunFolder,
    story: Story,
    ports: Ports,
    processes: Callable[[], list[psutil.Process]],
    tally: Tally,
) -> None:
    """Judge a run that has ended."""
    tally.look(harness, folder, ports, processes)
    status = Status.read(folder)
    events = list(read_events(folder.events))
    story.states = [str(event.data["to"]) for event in events if event.kind == "state"]
    story.resumes = story.states.count("queued")
    story.restarts = sum(event.kind == "restart" for event in events)
    tally.wrong += [
        f"{folder.run_id} ({story.crew}; {', '.join(story.strikes)}): {text}" for text in _wrong(folder, status, story)
    ]
    tally.unaccounted += [f"{folder.run_id}: {text}" for text in _unaccounted(status)]


def _wrong(folder: RunFolder, status: Status, story: Story) -> list[str]:
    found, last = [], "queued"
    for event in read_events(folder.events, kinds=("state",)):
        before, after = str(event.data["from"]), str(event.data["to"])
        if before != last or after not in TRANSITIONS.get(before, frozenset()):
            found.append(f"it was {last} and then went from {before} to {after}")
        if after == "failed" and event.data.get("component") not in story.struck:
            found.append(f"it failed by {event.data.get('component')}: {event.data.get('reason')}")
        if after == "lost" and not {"keeper", "server", "the tree of a server"} & set(story.strikes):
            found.append("it was lost although its keeper was not killed")
        last = after
    if last != status.state:
        found.append(f"its events end with {last} and its status is {status.state}")
    match status.state:
        case "completed" if not folder.results.exists():
            found.append("it completed without a report")
        case "stopped" if not story.stop_ordered:
            found.append(f"it is stopped without an order: {status.reason}")
        case "completed" | "stopped" | "failed":
            pass
        case other:
            found.append(f"it has not ended: {other} ({status.reason})")
    return found


def _unaccounted(status: Status) -> list[str]:
    found = []
    counts, making = status.counts, status.making
    if "waiting" in counts:
        parts = counts["waiting"] + counts["delivered"] + counts["committed"] + sum(counts.get("dropped", {}).values())
        if counts["accepted"] != parts:
            found.append(f"{counts['accepted']} groups were accepted and {parts} are accounted for")
    if making:
        parts = making.get("posted", 0) + making.get("unanswered", 0) + sum(making.get("given_up", {}).values())
        if making.get("begun", 0) != parts:
            found.append(f"{making.get('begun')} groups were begun and {parts} are accounted for")
    return found


def index_errors(harness: Path, started: set[str]) -> list[str]:
    """Return the problems of the index after the campaign: damage, missing starts, complaints of front ends."""
    found, complaints = [], harness / "complaints.log"
    db = sqlite3.connect(harness / "index.db")
    try:
        found += [str(row[0]) for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        noted = {str(row[0]) for row in db.execute("SELECT run_id FROM starts")}
        found += [f"the start of {run_id} is not noted" for run_id in sorted(started - noted)]
    finally:
        db.close()
    if complaints.exists():
        found += [line for line in complaints.read_text().splitlines() if line.startswith("corrupt:")]
    return found


def last_look(harness: Path, tally: Tally) -> None:
    """Record the files that lie beside the runs after the campaign. Listing the runs removes, after seconds, the files
    of killed front ends.
    """
    from benchmarks.faults.front import runs_at

    def left() -> list[Path]:
        runs_at(harness).list()
        names = (".making-*", "..*", ".reservations/.*.*", ".index.*")
        found = [
            path for name in names for path in (harness / "runs").glob(name) if not path.name.startswith(".machine")
        ]
        return [*found, *harness.glob(".index.*")]

    limit = time.monotonic() + 15.0
    while left() and time.monotonic() < limit:
        time.sleep(0.5)
    tally.files += [str(path.relative_to(harness)) for path in left()]
    if is_held(harness / "runs" / ".reservations" / "lock"):
        tally.locks.append("the lock of the reservations is held")


def said(story: Story) -> str:
    """Return a story as a line of JSON, for later inspection."""
    return json.dumps(
        {"crew": story.crew, "strikes": story.strikes, "states": " ".join(story.states), "restarts": story.restarts}
    )
