"""What a report tells of each environment by itself, where a run has several, and of how far their curricula came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toprope.analysis.statistics.intervals import rose
from toprope.errors import Corrupt
from toprope.records.run.curriculum import Curricula
from toprope.records.run.folder import RunFolder

if TYPE_CHECKING:
    from toprope.analysis.reports.report import Evaluation

__all__ = ["curricula_of", "rose_each"]


def rose_each(before: Evaluation | None, after: Evaluation | None) -> dict[str, bool]:
    """Of each environment that was measured twice, whether its accuracy rose by more than the intervals."""
    found = {}
    for label, one in (before.environments if before is not None and after is not None else {}).items():
        first, other = one.sampled, after.environments.get(label) if after is not None else None
        if first is not None and other is not None and other.sampled is not None:
            found[label] = rose(first.proportion(), other.sampled.proportion())
    return found


def curricula_of(folder: RunFolder) -> dict[str, Any]:
    """Where the curricula of a run stand, by environment: knob, levels, the number of the present level and the step at
    which it began, the measures that opened a level, and the last one."""
    try:
        found = Curricula.read(folder)
    except Corrupt:
        return {}
    return {
        label: {
            "knob": one.knob,
            "levels": one.levels,
            "level": one.level,
            "since": one.since,
            "opened": [measure.model_dump(exclude={"moved"}) for measure in one.measures if measure.moved],
            "last": one.measures[-1].model_dump(exclude={"moved"}) if one.measures else None,
        }
        for label, one in (found.environments if found else {}).items()
    }
