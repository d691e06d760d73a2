"""What is done to a run that nobody keeps, by whoever took its lock: finishing what a keeper could not, and making it
ready for the next.

The lock is free only when the keeper and all guards have ended, and guards end after their components. So usually
nothing is left to do but to write the end down. If keeper and guards were killed at the same moment, components may
have survived; they are known by the run folder in their environment and are ended here. What escapes even that is a
process that cleared its environment before guard and keeper were killed together.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from toprope.analysis.failures import named
from toprope.records.run.checkpoints import Damage, newest_sound, nothing_sound, set_aside
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import ENDED, LIVE, EventLog, Failure, Status, read_events
from toprope.supervisor.capacity.reservations import Reservations
from toprope.supervisor.runs.auto_resume_policy import (
    ResumeDecision,
    decide_auto_resume,
    describe_keeper_loss,
    stop_requested,
)
from toprope.supervisor.runs.orphan_reaper import reap_marked

__all__ = ["write_end", "cancel_auto_resume", "prepare_attempt", "settle_run", "reap_crew"]

_BEFORE = "before"
_HASH_BYTES = 2 << 30
"""A few seconds' worth: whoever asks for the next attempt waits for it."""


def settle_run(folder: RunFolder, swept: int | None = None) -> Status:
    """Ends a run whose keeper is gone; a run that has its end already is left as it is. The caller holds the lock.

    A run that somebody wanted to stop has stopped; any other is lost, with a note of whether it goes on by itself.

    Args:
        folder: The run's.
        swept: How many processes the caller has swept; None: they are swept here.

    Returns:
        The status that now lies on disk.

    Raises:
        NotFound, Corrupt: The status cannot be read.
    """
    status = Status.read(folder)
    if status.ended and status.ended_at is not None:
        return status
    if swept is None:
        swept = reap_crew(folder, status.attempt)
    reason = describe_keeper_loss(folder, status)
    if swept:
        reason += f" {swept} processes of its crew were still there and were ended."
    if status.ended or stop_requested(folder, status):
        return write_end(folder, "stopped", f"stopped on request. {reason}")
    ahead = decide_auto_resume(folder, status)
    return write_end(folder, "lost", f"{reason} {ahead.words}".rstrip(), ahead=ahead)


def write_end(
    folder: RunFolder,
    state: Literal["lost", "failed", "stopped"],
    reason: str = "",
    failure: Failure | None = None,
    ahead: ResumeDecision | None = None,
) -> Status:
    """Writes the end of a run that no keeper will write. The caller holds the lock, and the crew is gone.

    A run that failed or stopped before keeps that state and gets its end only. Events come first, so that whoever sees
    the end finds the whole story; whoever was killed in between is finished by the next, without a repetition.
    """
    now, status = time.time(), Status.read(folder)
    if not status.ended:
        status = status.model_copy(
            update={
                "state": state,
                "reason": failure.reason if failure else reason,
                "failure": named(failure) if failure else None,
                "since": now,
                "making": _closed(status.making),
                "resume_at": ahead.resume_at if ahead else None,
                "resumed_lost": ahead.times if ahead else status.resumed_lost,
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
    _tell_end(folder, status)
    status.write(folder)
    return status


def _closed(making: dict[str, Any]) -> dict[str, Any]:
    """The account of groups once their driver is gone: what it was making came to nothing."""
    if not making:
        return making
    given_up = dict(making.get("given_up", {}))
    left = making.get("begun", 0) - making.get("posted", 0) - making.get("unanswered", 0) - sum(given_up.values())
    if left > 0:
        given_up["the environment's driver ended"] = given_up.get("the environment's driver ended", 0) + left
    return {**making, "given_up": given_up}


def _tell_end(folder: RunFolder, status: Status) -> None:
    """Appends the events that are missing until the run's end."""
    last, over = "queued", False
    for event in read_events(folder.events, kinds=("state", "end")):
        over = event.kind == "end"
        if event.kind == "state":
            last = str(event.data.get("to", last))
    events, steps = EventLog(folder), [status.state]
    if status.state == "stopped" and last in LIVE - {"stopping"}:
        steps = ["stopping", "stopped"]
    if last in ENDED and status.state != last:
        steps.insert(0, "queued")  # whoever began the attempt was killed before it was told
    for step in steps:
        if last != step:
            events.append("state", **{"from": last, "to": step, "reason": status.reason})
            last, over = step, False
    if not over:
        events.append("end", state=status.state, seconds=round(max(0.0, status.ended_at - status.created_at), 3))


def cancel_auto_resume(folder: RunFolder, status: Status, why: str = "") -> Status:
    """Takes back that a lost run goes on by itself. The caller holds the lock.

    Args:
        folder: The run's.
        status: As it lies on disk.
        why: What stands against going on: the run stays lost. Empty: somebody stopped it, and it is stopped.
    """
    if status.state != "lost" or status.resume_at is None:
        return status
    now, reason = time.time(), f"{status.reason} {why}"
    if not why:
        reason = "stopped on request before it went on by itself"
        status = status.model_copy(update={"state": "stopped", "since": now})
        EventLog(folder).append("state", **{"from": "lost", "to": "stopped", "reason": reason})
        for order in folder.orders.glob("stop-*.json"):
            order.unlink(missing_ok=True)
    status = status.model_copy(update={"resume_at": None, "reason": reason, "updated_at": now})
    status.write(folder)
    return status


def prepare_attempt(folder: RunFolder, former: Status, *, by_itself: bool = False) -> Status:
    """Makes a run that has ended ready for the keeper of its next attempt. The caller holds the lock.

    What was evaluated before training stays; evaluations of an end that did not hold go, and so do orders that came
    too late for the former keeper.

    Returns:
        The status, `queued`, as it now lies on disk.

    Raises:
        NotFound, Corrupt: Specification or checkpoint cannot be read; nothing was changed.
    """
    specification = Specification.read(folder)
    checkpoint, damaged = _checkpoint(folder) if specification.run_kind.trains else (None, [])
    kept = [f"{damage} It is kept as {set_aside(damage.path).name}." for damage in damaged]
    folder.tidy()
    # An order to stop that came while nobody kept the run holds for a run that goes on by itself.
    late = () if by_itself else folder.orders.glob("*")
    for path in (*late, *folder.orders.glob(".*"), folder.results):
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
            "resume_at": None,
            "resumed_lost": former.resumed_lost + 1 if by_itself else 0,
        }
    )
    status.write(folder)
    step = checkpoint["step"] if checkpoint else 0
    data = {"from": former.state, "to": "queued", "reason": f"attempt {status.attempt}, from step {step}"}
    if by_itself:
        data["reason"] += ", by itself"
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


def reap_crew(folder: RunFolder, generation: int | None = None) -> int:
    """Kills what carries the run's mark, up to that attempt; how many there were. The caller holds the lock."""
    marker = str(folder.path.resolve())
    return reap_marked({marker: generation})[marker]
