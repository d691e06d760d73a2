"""The figures of a finished run as files of TensorBoard, in a folder of one's own."""

from __future__ import annotations

from pathlib import Path

from toprope.errors import NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.trackers.follower import RunFollower
from toprope.trackers.tensorboard import TensorBoardTracker
from toprope.trackers.tracker import tracked_run


def export_to_tensorboard(folder: RunFolder, target: Path) -> Path:
    """Write a run's steps, evaluations, tests or candidates; return the folder of the files.

    Args:
        target: The folder for the files of this run; it must not have any yet.

    Raises:
        NotPossibleNow: The run is live, or the folder has files already; nothing was written.
        ComponentFailed: The files cannot be written.
        NotFound, Corrupt: The run's records cannot be read.
    """
    specification, status = Specification.read(folder), Status.read(folder)
    if not status.ended:
        raise NotPossibleNow(f"{folder.run_id} has not ended.", hint="logging.trackers writes while a run lives.")
    if target.is_dir() and any(target.iterdir()):
        raise NotPossibleNow(f"{target} has files already; nothing was written.", hint="Name another folder.")
    tracker = TensorBoardTracker(tracked_run(specification, folder.path, status.attempt), target)
    RunFollower(folder, specification, [tracker], keeps_record=False).finish()
    return target
