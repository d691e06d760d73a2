"""TensorBoard as a tracker: event files below the run's folder, or in a folder of one's own for a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprope.errors import ComponentFailed, NotPossibleNow
from toprope.extras import install_command
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.trackers.follower import RunFollower
from toprope.trackers.tracker import SteppedTracker, TrackedRun, Value, tracked_run

FOLDER = "tensorboard"


class TensorBoardTracker(SteppedTracker):
    """See `Tracker`. Each attempt writes a file of its own; TensorBoard joins them, and of two values for one step the
    later one counts.

    Args:
        folder: For the event files; `tensorboard` in the run's folder by default.

    Raises:
        ComponentFailed: The package is missing, or the folder cannot be written.
    """

    name = "tensorboard"

    def __init__(self, run: TrackedRun, folder: Path | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ComponentFailed(
                "TensorBoard files need the package tensorboardX, which is not installed.",
                hint=f"The owner installs it: {install_command()}",
            ) from None
        self._folder = folder or run.folder / FOLDER
        try:
            self._writer = SummaryWriter(str(self._folder), filename_suffix=f".attempt-{run.attempt}")
        except OSError as error:
            raise ComponentFailed(f"TensorBoard files cannot be written: {error}.") from None
        # Indented text is shown as it is.
        text = json.dumps({"kind": run.kind, "group": run.group, **run.config}, indent=2, default=str)
        self._writer.add_text("configuration", "\n".join(f"    {line}" for line in text.splitlines()), 0)

    @property
    def record(self) -> dict[str, Any]:
        """See `Tracker.record`."""
        return {"folder": str(self._folder)}

    def finish(self, exit_code: int) -> None:
        """See `Tracker.finish`."""
        try:
            self._writer.close()
        except OSError as error:
            raise ComponentFailed(f"TensorBoard files cannot be written: {error}.") from None

    def _write(self, values: Mapping[str, Value]) -> None:
        try:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(name, float(value), self._step)
        except OSError as error:
            raise ComponentFailed(f"TensorBoard files cannot be written: {error}.") from None


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
