"""What is to become of a run whose keeper is gone: whether it goes on by itself, and when.

Nobody restarts a lost keeper until somebody looks. Whoever does finishes the clean-up and notes in the status whether
and from when the run may go on (`resume_at`), by the run's own `launcher.resume_lost`. Going on needs the owner's
variables, so only a front end that has them does it; one without leaves the note to the next.

Only a note of this kind makes a run go on: runs that were lost before there were any, and those that somebody stopped
meanwhile, stay as they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from toprope.errors import Corrupt, NotFound, TopropeError
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status, read_events
from toprope.supervisor.lock import boot_id

__all__ = ["ResumeDecision", "is_due", "decide_auto_resume", "stop_requested", "describe_keeper_loss"]

_LONGEST_WAIT_S = 3600.0
"""Waits double, and end here. A note that lies further ahead was written before the clock was set back."""


@dataclass(frozen=True)
class ResumeDecision:
    """Whether a lost run goes on. `resume_at`: from when, in seconds since the epoch; None: it stays lost. `times`: how
    often in a row it was resumed by itself before. `words`: the same for people."""

    resume_at: float | None
    times: int
    words: str


def decide_auto_resume(folder: RunFolder, status: Status, now: float | None = None) -> ResumeDecision:
    """What the run's own policy says of it.

    Args:
        folder: The run's.
        status: As its keeper left it.
        now: Seconds since the epoch.

    Returns:
        The prospect. Resumes in a row are counted anew once an attempt has made a checkpoint: what gets on is not ended
        because the machine is restarted every week.
    """
    now = time.time() if now is None else now
    progress_event = status.run_kind.progress_event
    if progress_event is None:
        return ResumeDecision(None, 0, "")
    try:
        launcher = Specification.read(folder).config.launcher
    except (Corrupt, NotFound):
        return ResumeDecision(None, 0, "")
    times = 0 if _got_on(folder, progress_event) else status.resumed_lost
    if launcher.resume_lost == "never":
        return ResumeDecision(None, times, "")
    if times >= launcher.resume_lost_limit:
        words = f"It went on by itself {times} times without a new checkpoint and does not again; resume_training does."
        return ResumeDecision(None, times, words if times else "")
    wait = min(launcher.resume_lost_backoff_s * 2 ** (times - 1), _LONGEST_WAIT_S) if times else 0.0
    words = f"It goes on by itself{f' in {wait:.0f} s' if wait else ''}, when somebody looks."
    return ResumeDecision(now + wait, times, words)


def is_due(status: Status, now: float | None = None) -> bool:
    """Whether a lost run is to go on now."""
    if status.state != "lost" or status.resume_at is None or status.ended_at is None:
        return False
    ahead = status.resume_at - (time.time() if now is None else now)
    return ahead <= 0 or ahead > 2 * _LONGEST_WAIT_S


def stop_requested(folder: RunFolder, status: Status) -> bool:
    """Whether somebody wanted the run to stop: its keeper was doing so, or the order still lies there."""
    return status.state == "stopping" or any(folder.orders.glob("stop-*.json"))


def describe_keeper_loss(folder: RunFolder, status: Status) -> str:
    """How a run lost its keeper, for people: the machine was restarted, or the keeper ended. The caller holds the lock,
    whose file still says when the last keeper took it."""
    try:
        booted = read_json(folder.lock).get("boot")
    except (TopropeError, AttributeError):
        booted = None
    here = boot_id()
    if booted and here and booted != here:
        return f"The machine was restarted while the run was {status.state}."
    return f"The keeper was gone while the run was {status.state}."


def _got_on(folder: RunFolder, progress_event: str) -> bool:
    """Whether the last attempt made a checkpoint; of a sweep, whether it came through an epoch."""
    saved = False
    for event in read_events(folder.events, kinds=("state", progress_event)):
        if event.kind == progress_event:
            saved = True
        elif event.data.get("to") == "queued":
            saved = False
    return saved
