"""Progress of a curriculum: the level at which training tasks are sampled, and when the next one opens.

A level opens when enough validation tasks of the current one are solved; held-out tasks are never used. A share of the
groups stays at earlier levels, so that what was learned there is not forgotten; which groups do is deterministic.
"""

from __future__ import annotations

from toprope.records.run.curriculum import CurriculumState, LevelMeasurement
from toprope.settings.sections.mixture import Curriculum


def level_variant(number: int) -> str:
    """Name of a curriculum level's variant in the worker."""
    return f"level-{number}"


class CurriculumProgress:
    """The curriculum of one environment.

    Args:
        curriculum: The configuration.
        record: Progress of an earlier attempt or life; ignored if its knob or levels differ. None: the first level.
    """

    def __init__(self, curriculum: Curriculum, record: CurriculumState | None = None) -> None:
        self.curriculum = curriculum
        if record is None or (record.knob, record.levels) != (curriculum.knob, curriculum.levels):
            record = CurriculumState(knob=curriculum.knob, levels=curriculum.levels)
        self.record = record
        self._measured_at = max([record.since, *(measure.step for measure in record.measures)])
        self._chosen = self._earlier = 0

    @property
    def level(self) -> int:
        """Number of the current level, from 0."""
        return self.record.level

    @property
    def at_last_level(self) -> bool:
        return self.level >= len(self.curriculum.levels) - 1

    def next_level(self) -> int:
        """Level of the next group of training tasks: mostly the current one."""
        self._chosen += 1
        if self.level and int(self._chosen * self.curriculum.earlier_share) > self._earlier:
            self._earlier += 1
            return (self._earlier - 1) % self.level
        if not self.level:
            self._earlier = int(self._chosen * self.curriculum.earlier_share)  # no debt from the first level
        return self.level

    def is_due(self, step: int) -> bool:
        """True if the current level should be measured after `step` steps."""
        return not self.at_last_level and step >= self._measured_at + self.curriculum.min_steps

    def add_measure(self, step: int, successes: int, tasks: int) -> LevelMeasurement:
        """Records a measure of the current level; opens the next level if it is good enough."""
        moved = tasks > 0 and successes >= self.curriculum.success * tasks and not self.at_last_level
        measure = LevelMeasurement(step=step, level=self.level, successes=successes, tasks=tasks, moved=moved)
        self._measured_at = step
        self.record = self.record.model_copy(update={"measures": [*self.record.measures, measure]})
        if moved:
            self.record = self.record.model_copy(update={"level": self.level + 1, "since": step})
        return measure
