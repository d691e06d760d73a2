"""Decides whether and when a lost run, whose keeper is gone, resumes by itself.

Nothing restarts a lost keeper until a front end looks at the run. That front end finishes the clean-up and notes in the
status from when the run may resume (`resume_at`), by the run's own `launcher.resume_lost`. To resume it needs the
owner's variables; a front end without them leaves the note to the next one.

Only this note lets a run resume: a run that was lost before such notes existed, or that was stopped meanwhile, stays as
it is.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from toprope.errors import Corrupt, NotFound
from toprope.machine import boot_id
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status, read_events
from toprope.supervisor.heartbeat import read_holder
from toprope.supervisor.launchers.engine import NEVER_PLACED

_LONGEST_WAIT_S = 3600.0
"""Waiting times double up to this limit. A note further ahead was written before the clock was set back."""


@dataclass(frozen=True)
class ResumeDecision:
    """The decision whether and when a lost run resumes."""

    resume_at: float | None
    """Seconds since the epoch; None: the run stays lost."""
    count: int
    """The number of automatic resumes in a row so far."""
    explanation: str
    """The decision in words; may be empty."""


def decide_auto_resume(
    folder: RunFolder, status: Status, now: float | None = None, *, told: str = ""
) -> ResumeDecision:
    """Decide by the run's own policy whether it resumes.

    The count of resumes starts anew once an attempt has made progress, so that a run does not end because the machine
    restarts every week.

    Args:
        status: As its keeper left it.
        now: Seconds since the epoch; the present time when None.
        told: How its job ended, in the words of its engine.
    """
    now = time.time() if now is None else now
    progress_event = status.run_kind.progress_event
    if progress_event is None:
        return ResumeDecision(None, 0, "")
    try:
        launcher = Specification.read(folder).config.launcher
    except (Corrupt, NotFound):
        return ResumeDecision(None, 0, "")
    count = 0 if _made_progress(folder, progress_event) else status.resumed_lost
    if NEVER_PLACED in told and status.started_at is None:  # the cluster was busy; the attempt failed at nothing
        count = max(0, count - 1)
    if launcher.resume_lost == "never":
        return ResumeDecision(None, count, "")
    if count >= launcher.resume_lost_limit:
        text = (
            f"It resumed by itself {count} times without a new checkpoint and stops trying; resume_training resumes it."
        )
        return ResumeDecision(None, count, text if count else "")
    wait = min(launcher.resume_lost_backoff_s * 2 ** (count - 1), _LONGEST_WAIT_S) if count else 0.0
    text = f"It resumes by itself{f' in {wait:.0f} s' if wait else ''}, as soon as a front end looks at it."
    return ResumeDecision(now + wait, count, text)


def is_due(status: Status, now: float | None = None) -> bool:
    """True if a lost run is to resume now."""
    if status.state != "lost" or status.resume_at is None or status.ended_at is None:
        return False
    ahead = status.resume_at - (time.time() if now is None else now)
    return ahead <= 0 or ahead > 2 * _LONGEST_WAIT_S


def stop_requested(folder: RunFolder, status: Status) -> bool:
    """True if the run was told to stop: its keeper was stopping it, or the order is still unread."""
    return status.state == "stopping" or any(folder.orders.glob("stop-*.json"))


def describe_keeper_loss(folder: RunFolder, status: Status) -> str:
    """Say how a run lost its keeper: its folder was deleted, its machine was restarted, or the keeper ended. The caller
    holds the lock, whose file still names the last keeper."""
    if not folder.spec.exists():
        return (
            f"The run's folder was deleted while the run was {status.state}; {folder.path} holds what was written "
            "since, and nothing of the run can be used. Delete that, too."
        )
    holder = read_holder(folder)
    booted, node, here = holder.get("boot"), holder.get("node"), os.uname().nodename
    if node and node != here:
        return f"The keeper, on {node}, was gone while the run was {status.state}."
    current_boot = boot_id()
    if booted and current_boot and booted != current_boot:
        return f"The machine was restarted while the run was {status.state}."
    return f"The keeper was gone while the run was {status.state}."


def _made_progress(folder: RunFolder, progress_event: str) -> bool:
    """True if the last attempt recorded its kind's event of progress, such as a checkpoint."""
    progressed = False
    for event in read_events(folder.events, kinds=("state", progress_event)):
        if event.kind == progress_event:
            progressed = True
        elif event.data.get("to") == "queued":
            progressed = False
    return progressed
