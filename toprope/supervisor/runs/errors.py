"""Errors for runs that cannot be started, resumed or read now."""

from __future__ import annotations

from toprope.errors import NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Status


class KeeperUnknown(NotPossibleNow):
    """The engine of a run does not answer, so the run may still have its keeper."""


def cannot_write(folder: RunFolder, error: OSError) -> NotPossibleNow:
    """The disk is full, or the folder is not writable."""
    return NotPossibleNow(
        f"The run {folder.run_id!r} could not be written below {folder.path.parent}: {error.strerror or error}.",
        hint="Nothing was started. `toprope doctor` shows the free space, `toprope prune` removes old runs.",
    )


def still_running(status: Status) -> NotPossibleNow:
    """The run has its keeper, or its processes are still ending."""
    if status.ended:
        return NotPossibleNow(
            f"{status.run_id} is {status.state}, but its processes are still ending; it was not resumed.",
            hint="Call again in a few seconds.",
        )
    return NotPossibleNow(
        f"{status.run_id} is {status.state} under its keeper (attempt {status.attempt}): there is nothing to resume.",
        hint=f'check_status(run_ids=["{status.run_id}"], wait_s=45) follows it; stop_training stops it.',
    )


def unknown_keeper(folder: RunFolder, reason: str) -> KeeperUnknown:
    """The engine that was given the run does not answer, so the run may still have its keeper."""
    return KeeperUnknown(
        f"{folder.run_id} was not resumed, because it may still run. {reason}",
        hint="Call again when the cluster answers; `toprope doctor --cluster NAME` asks it.",
    )


def unreadable_status(folder: RunFolder, error: Exception) -> Status:
    """Return a status, for lists, of a run whose own status cannot be read."""
    at = folder.path.stat().st_mtime
    return Status(
        run_id=folder.run_id,
        kind="",
        environment="",
        state="lost",
        reason=f"Its status cannot be read: {error}",
        created_at=at,
        since=at,
        updated_at=at,
        ended_at=at,
    )
