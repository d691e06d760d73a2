"""A curriculum in progress: at which level training tasks are made, and when the next one is opened.

The level moves when enough validation tasks of the present one are solved; held-out tasks are never looked at. Some
groups stay at earlier levels, so that what was learned there is not unlearned. Which ones is no matter of chance.
"""

from __future__ import annotations

from toprope.records.run.curriculum import Climbed, Measure
from toprope.settings.mixture import Curriculum

__all__ = ["Climb"]


class Climb:
    """One environment's.

    Args:
        curriculum: What the configuration says.
        stands: Where an earlier attempt or life stood; None: at the first level.
    """

    def __init__(self, curriculum: Curriculum, stands: Climbed | None = None) -> None:
        self.curriculum = curriculum
        fits = stands is not None and stands.knob == curriculum.knob and stands.levels == curriculum.levels
        self.stands = stands if stands is not None and fits else Climbed(knob=curriculum.knob, levels=curriculum.levels)
        self._measured_at = max([self.stands.since, *(one.step for one in self.stands.measures)])
        self._chosen = self._earlier = 0

    @property
    def level(self) -> int:
        """Number of the present level, from 0."""
        return self.stands.level

    @property
    def at_the_top(self) -> bool:
        return self.level >= len(self.curriculum.levels) - 1

    def next_level(self) -> int:
        """The level of the next group of training tasks: mostly the present one."""
        self._chosen += 1
        if self.level and int(self._chosen * self.curriculum.earlier_share) > self._earlier:
            self._earlier += 1
            return (self._earlier - 1) % self.level
        if not self.level:
            self._earlier = int(self._chosen * self.curriculum.earlier_share)  # nothing to make up for
        return self.level

    def due(self, step: int) -> bool:
        """Whether the present level is to be measured after `step` steps."""
        return not self.at_the_top and step >= self._measured_at + self.curriculum.min_steps

    def measured(self, step: int, successes: int, tasks: int) -> Measure:
        """Takes a measure of the present level; moves to the next one where it is good enough."""
        moved = tasks > 0 and successes >= self.curriculum.success * tasks and not self.at_the_top
        measure = Measure(step=step, level=self.level, successes=successes, tasks=tasks, moved=moved)
        self._measured_at = step
        update = {"measures": [*self.stands.measures, measure]}
        if moved:
            update |= {"level": self.level + 1, "since": step}  # type: ignore[dict-item]
        self.stands = self.stands.model_copy(update=update)
        return measure
