"""What is done to a run that nobody keeps, by whoever took its lock: finishing what a keeper could not, and making it
ready for the next.

The lock is free only when the keeper and all guards have ended, and guards end after their components. So usually
nothing is left to do but to write the end down. If keeper and guards were killed at the same moment, components may
have survived; they are known by the run folder in their environment and are ended here. What escapes even that is a
process that cleared its environment before guard and keeper were killed together.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

from toprope.records.checkpoints import Damage, newest_sound, nothing_sound, set_aside
from toprope.records.crew import ENV_FOLDER
from toprope.records.folder import RunFolder
from toprope.records.specification import Specification
from toprope.records.status import EventLog, Failure, Status, read_events
from toprope.supervisor.reservations import Reservations

__all__ = ["end_unkept", "prepare_attempt", "settle", "sweep_marked"]

_ROUNDS = 5
_WAIT_S = 2.0
_BEFORE = "before"
_HASH_BYTES = 2 << 30
"""A few seconds' worth: whoever asks for the next attempt waits for it."""


def settle(folder: RunFolder) -> Status:
    """Ends a run whose keeper is gone; a run that has its end already is left as it is. The caller holds the lock.

    Returns:
        The status that now lies on disk.

    Raises:
        NotFound, Corrupt: The status cannot be read.
    """
    status = Status.read(folder)
    if status.ended and status.ended_at is not None:
        return status
    swept = sweep_marked(folder)
    reason = f"The keeper was gone while the run was {status.state}."
    if swept:
        reason += f" {swept} processes of its crew were still there and were ended."
    return end_unkept(folder, "lost", reason)


def end_unkept(
    folder: RunFolder, state: Literal["lost", "failed"], reason: str = "", failure: Failure | None = None
) -> Status:
    """Writes the end of a run that no keeper will write. The caller holds the lock, and the crew is gone.

    A run that failed or stopped before keeps that state and gets its end only.
    """
    now, status = time.time(), Status.read(folder)
    before = status.state
    if not status.ended:
        status = status.model_copy(
            update={
                "state": state,
                "reason": failure.reason if failure else reason,
                "failure": failure,
                "since": now,
                "crew": {
                    name: member if member.state in ("finished", "stopped") else member.model_copy(
                        update={"state": "exited", "since": now}
                    )
                    for name, member in status.crew.items()
                },
            }
        )  # fmt: skip
    status = status.model_copy(update={"ended_at": now, "updated_at": now})
    folder.tidy()
    Reservations(folder.path.parent).leave(folder.run_id)
    status.write(folder)
    events = EventLog(folder)
    if status.state != before:
        events.append("state", **{"from": before, "to": status.state, "reason": status.reason})
    events.append("end", state=status.state, seconds=round(now - status.created_at, 3))
    return status


def prepare_attempt(folder: RunFolder, former: Status) -> Status:
    """Makes a run that has ended ready for the keeper of its next attempt. The caller holds the lock.

    What was evaluated before training stays; evaluations of an end that did not hold go, and so do orders that came
    too late for the former keeper.

    Returns:
        The status, `queued`, as it now lies on disk.

    Raises:
        NotFound, Corrupt: Specification or checkpoint cannot be read; nothing was changed.
    """
    specification = Specification.read(folder)
    checkpoint, damaged = _checkpoint(folder) if specification.kind == "train" else (None, [])
    kept = [f"{damage} It is kept as {set_aside(damage.path).name}." for damage in damaged]
    folder.tidy()
    for path in (*folder.orders.glob("*"), *folder.orders.glob(".*"), folder.results):
        path.unlink(missing_ok=True)
    for path in folder.evaluations.glob("*.json"):
        if path != folder.evaluation(_BEFORE):
            path.unlink(missing_ok=True)
    for path in (folder.orders, folder.evaluations, folder.journal, folder.checkpoints, folder.logs, folder.crew):
        path.mkdir(mode=0o700, exist_ok=True)
    # Events are written at once, the numbers in a status a little later: a keeper that was killed may not have.
    measured = {
        event.data["label"]: event.data["summary"]
        for event in read_events(folder.events)
        if event.kind == "evaluation" and event.data.get("label") == _BEFORE
    }
    now = time.time()
    status = former.model_copy(
        update={
            "state": "queued",
            "reason": "",
            "attempt": former.attempt + 1,
            "started_at": None,
            "training_at": None,
            "ended_at": None,
            "since": now,
            "updated_at": now,
            "progress": {},
            "crew": {},
            "evaluations": measured if folder.evaluation(_BEFORE).exists() else {},
            "checkpoint": checkpoint,
            "failure": None,
        }
    )
    status.write(folder)
    step = checkpoint["step"] if checkpoint else 0
    data = {"from": former.state, "to": "queued", "reason": f"attempt {status.attempt}, from step {step}"}
    events = EventLog(folder)
    for text in kept:
        events.append("warning", what=f"{text} The run goes on from step {step}.")
    events.append("state", **data)
    return status


def _checkpoint(folder: RunFolder) -> tuple[dict[str, Any] | None, list[Damage]]:
    """The newest sound checkpoint as a status tells it, and what is damaged after it. A keeper that was killed may not
    have heard of it. Of a large one the trainer compares the rest.

    Raises:
        Corrupt: There are checkpoints, and none of them is sound.
    """
    found, damaged = newest_sound(folder, hash_bytes=_HASH_BYTES)
    if found is None and damaged:
        raise nothing_sound(folder, damaged)
    return None if found is None else found.told(folder), damaged


def sweep_marked(folder: RunFolder) -> int:
    """Kills the processes of this user that carry the run's folder in their environment; how many there were.

    This process and those above it are spared: a front end may have been started from within a run.
    """
    import psutil

    marker = str(folder.path.resolve())
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: set[int] = set()
    for _ in range(_ROUNDS):
        marked = []
        for process in psutil.process_iter():
            try:
                if process.pid not in spared and process.environ().get(ENV_FOLDER) == marker:
                    process.kill()
                    marked.append(process)
            except (psutil.Error, OSError):
                continue
        if not marked:
            break
        found.update(process.pid for process in marked)
        psutil.wait_procs(marked, timeout=_WAIT_S)
    return len(found)
