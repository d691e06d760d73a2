"""The seam to experiment trackers: what a run tells each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Value = float | int | str | bool


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it. All attempts of a run are one run there."""

    run_id: str
    project: str
    kind: str
    folder: Path
    """The run folder, where a tracker keeps files of its own."""
    group: str | None = None
    """The sweep or seed group that the run belongs to."""
    config: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1


AXES: Mapping[str, str] = {
    "train": "train/global_step",
    "heldout": "train/global_step",
    "validation": "train/global_step",
    "own": "train/global_step",
    "test": "test/step",
    "sweep": "sweep/candidate",
}
"""The metric that is the horizontal axis of the metrics below each prefix. Every logged row has the axis of its own."""


class Tracker(Protocol):
    """One tracker with one run open. All methods raise ComponentFailed."""

    name: str
    """Its name in messages."""

    @property
    def record(self) -> dict[str, Any]:
        """What results tell about it: `folder` and `url`, if there are any."""

    def log(self, values: Mapping[str, Value]) -> None:
        """Log a row of metrics; `AXES` names the one that is its position."""

    def summarize(self, values: Mapping[str, Value]) -> None:
        """Set figures of the whole run."""

    def finish(self, exit_code: int) -> None:
        """Close the run and wait until everything is written or sent. 0: it completed or was stopped."""
