"""trackio as a tracker: a local database and dashboard, without an account."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.errors import ComponentFailed
from toprope.trackers.tracker import SteppedTracker, TrackedRun, Value, in_short


class TrackioTracker(SteppedTracker):
    """See `Tracker`. `trackio show --project PROJECT` opens its dashboard; TRACKIO_DIR among the owner's variables for
    `tracker` moves its database.

    Raises:
        ComponentFailed: The package is missing, or it does not start.
    """

    name = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        try:
            import trackio
        except ImportError:
            raise ComponentFailed(
                "logging.trackers names trackio, which is not installed.", hint="The owner runs: pip install trackio"
            ) from None
        self._project = run.project
        try:
            self._run = trackio.init(
                project=run.project,
                name=run.run_id,
                group=run.group,
                config={"kind": run.kind, **run.config},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # it has no common root of its errors
            raise ComponentFailed(f"trackio did not start: {in_short(error)}.") from None

    @property
    def record(self) -> dict[str, Any]:
        """See `Tracker.record`."""
        return {"project": self._project}

    def flush(self) -> None:
        """See `Tracker.flush`. trackio writes by itself."""

    def finish(self, exit_code: int) -> None:
        """See `Tracker.finish`."""
        try:
            self._run.finish()
        except Exception as error:
            raise ComponentFailed(f"trackio did not finish: {in_short(error)}.") from None

    def _write(self, values: Mapping[str, Value]) -> None:
        try:
            self._run.log(dict(values), step=self._step)
        except Exception as error:
            raise ComponentFailed(f"trackio did not take figures: {in_short(error)}.") from None
