"""The seam to experiment trackers: what a run tells each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from toprope.records.run.specification import Specification

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
    "evaluation": "train/global_step",
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
        """Its record in results: `folder` and `url`, if it has them."""

    def log(self, values: Mapping[str, Value]) -> None:
        """Log a row of metrics; `AXES` names the one that is its position."""

    def summarize(self, values: Mapping[str, Value]) -> None:
        """Set figures of the whole run."""

    def flush(self) -> None:
        """Write down what was logged so far, as far as the tracker lets its user decide when."""

    def finish(self, exit_code: int) -> None:
        """Close the run and wait until everything is written or sent. 0: it completed or was stopped."""


class SteppedTracker(ABC):
    """The part of a tracker whose figures have one position, the newest step."""

    _step = 0

    def log(self, values: Mapping[str, Value]) -> None:
        """See `Tracker.log`."""
        axis = next((name for name in AXES.values() if name in values), None)
        if axis is not None:
            self._step = int(values[axis])
        self._write({name: value for name, value in values.items() if name != axis})

    def summarize(self, values: Mapping[str, Value]) -> None:
        """Log figures of the whole run as `summary/...` at the newest step."""
        self._write({f"summary/{name}": value for name, value in values.items()})

    @abstractmethod
    def _write(self, values: Mapping[str, Value]) -> None:
        """Write figures at the newest step. Raises: ComponentFailed."""


def in_short(error: Exception) -> str:
    """An error on one line, for a message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def tracked_run(spec: Specification, folder: Path, attempt: int) -> TrackedRun:
    """A run as trackers know it, from its specification."""
    return TrackedRun(
        run_id=spec.run_id,
        project=spec.config.logging.wandb_project,
        kind=spec.kind,
        folder=folder,
        group=_group(spec),
        config={
            **spec.config.model_dump(mode="json", exclude={"launcher"}),
            "environment_name": spec.environment.name,
            "toprope_version": spec.toprope_version,
            **({} if spec.sweep is None else {"sweep": spec.sweep.model_dump(mode="json", exclude={"knobs"})}),
            **({} if spec.member is None else {"candidate": spec.member.candidate, "epoch": spec.member.epoch}),
        },
        attempt=attempt,
    )


def _group(spec: Specification) -> str | None:
    if spec.member is not None:
        return spec.member.sweep
    if spec.kind == "sweep":
        return spec.run_id
    return spec.seed_group.id if spec.seed_group else None
