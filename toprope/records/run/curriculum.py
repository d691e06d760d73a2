"""Progress of a run's curricula: curriculum.json in its folder, by environment.

The driver writes it after each measurement. A restarted driver, and an attempt that resumes from a checkpoint, continue
from it; a level that was reached after the checkpoint does not count.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder, find_record

CURRICULUM_VERSION = 1
_NAME = "curriculum.json"
_MOST_MEASURES = 200


class LevelMeasurement(BaseModel):
    """One measurement on validation tasks: after `step` updates of the policy, at level number `level`."""

    step: int
    level: int
    successes: int
    tasks: int
    moved: bool = False
    """True if it opened the next level."""


class CurriculumState(BaseModel):
    """One environment's curriculum: its knob, the values of its levels, and the measurements, oldest first."""

    knob: str
    levels: list[Any]
    level: int = 0
    since: int = 0
    """The step at which the present level began."""
    measures: list[LevelMeasurement] = []

    @property
    def value(self) -> Any:
        """The present value of the knob."""
        return self.levels[min(self.level, len(self.levels) - 1)]

    def at(self, step: int) -> CurriculumState:
        """The progress after `step` steps."""
        measures = [measure for measure in self.measures if measure.step <= step]
        moves = [measure for measure in measures if measure.moved]
        level, since = (moves[-1].level + 1, moves[-1].step) if moves else (0, 0)
        if self.level <= level:
            level, since = self.level, min(self.since, step)
        return self.model_copy(update={"measures": measures, "level": level, "since": since})


class Curricula(BaseModel):
    """The content of curriculum.json."""

    version: int = CURRICULUM_VERSION
    environments: dict[str, CurriculumState] = {}
    """By the environment's label."""

    @classmethod
    def read(cls, folder: RunFolder) -> Curricula | None:
        """A run's curricula; None if it has none, or no measurement yet.

        Raises:
            Corrupt: The file cannot be read.
        """
        return find_record(folder.path / _NAME, CURRICULUM_VERSION, cls)

    def moved_at(self) -> list[int]:
        """Return the steps after which a level opened, in any environment."""
        return [measure.step for state in self.environments.values() for measure in state.measures if measure.moved]

    def write(self, folder: RunFolder) -> None:
        """Replace the file. Raises: OSError."""
        environments = {
            label: state.model_copy(update={"measures": _thin(state.measures)})
            for label, state in self.environments.items()
        }
        write_json(folder.path / _NAME, self.model_copy(update={"environments": environments}).model_dump(mode="json"))


def _thin(measures: list[LevelMeasurement]) -> list[LevelMeasurement]:
    """All measurements that opened a level, and the newest others."""
    newest = {id(measure) for measure in measures[-_MOST_MEASURES:]}
    return [measure for measure in measures if measure.moved or id(measure) in newest]
