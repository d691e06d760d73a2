"""TensorBoard as a tracker: event files below the run's folder, or in a folder of one's own for a finished run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
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
            from tensorboardX.event_file_writer import EventsWriter
        except ImportError:
            raise ComponentFailed(
                "TensorBoard files need the package tensorboardX, which is not installed.",
                hint=f"The owner installs it: {install_command()}",
            ) from None
        self._folder = folder or run.folder / FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"), f".attempt-{run.attempt}")
        except OSError as error:
            raise ComponentFailed(f"TensorBoard files cannot be written: {error}.") from None
        # Indented text is shown as it is.
        config = json.dumps({"kind": run.kind, "group": run.group, **run.config}, indent=2, default=str)
        self._add("text", "configuration", "\n".join(f"    {line}" for line in config.splitlines()))

    @property
    def record(self) -> dict[str, Any]:
        """See `Tracker.record`."""
        return {"folder": str(self._folder)}

    def flush(self) -> None:
        """See `Tracker.flush`."""
        self._call(self._writer.flush)

    def finish(self, exit_code: int) -> None:
        """See `Tracker.finish`."""
        self._call(self._writer.close)

    def _write(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._add("scalar", name, float(value))

    def _add(self, kind: str, name: str, value: str | float) -> None:
        # Its SummaryWriter would hold events for up to two minutes, in a queue that nothing flushes.
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        content = getattr(summary, kind)(name, value)
        self._call(self._writer.write_event, Event(wall_time=time.time(), step=self._step, summary=content))

    def _call(self, method: Callable[..., object], *arguments: object) -> None:
        try:
            method(*arguments)
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
