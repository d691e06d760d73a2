"""Curricula of reasoning-gym as the knob `difficulty`: 0 as configured, n for level n of every attribute.

A curriculum names attributes of a task, each with a list of levels and the configuration fields that a level sets. All
attributes move together, as in `set_global_level`; one with fewer levels stays at its last. A range begins at its
easiest level, so that harder settings still contain easy tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Levels", "levels_of"]

_LONGEST_HELP = 400


class Levels:
    """The levels of a task that its configuration accepts.

    Args:
        curriculum: Curriculum class of reasoning-gym.
        config: Configuration class of the task.
    """

    def __init__(self, curriculum: type, config: type) -> None:
        attributes = list(curriculum().attributes.values())
        self._accepted_levels: list[dict[str, Any]] = []
        refused = []
        for level in range(max((len(attribute.levels) for attribute in attributes), default=0)):
            values = _governed(curriculum, level)
            if _accepted(config, values):
                self._accepted_levels.append(values)
            else:
                refused.append(str(level))
        self.help = _help([(attribute.name, list(attribute.levels)) for attribute in attributes], refused)

    @property
    def count(self) -> int:
        """The highest difficulty."""
        return len(self._accepted_levels)

    def values(self, difficulty: int, configured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration fields at a difficulty; other fields keep their values.

        Args:
            difficulty: 0 as configured; above `count` the last level.
            configured: Configured values.
        """
        governed = self._accepted_levels[min(difficulty, self.count) - 1] if difficulty and self.count else {}
        return {**configured, **governed}


def levels_of(name: str, config: type) -> Levels | None:
    """Return the levels of a task; None without a working curriculum. Imports reasoning-gym."""
    from reasoning_gym.factory import CURRICULA

    curriculum = CURRICULA.get(name)
    levels = Levels(curriculum, config) if isinstance(curriculum, type) else None
    return levels if levels is not None and levels.count else None


def _governed(curriculum: type, level: int) -> dict[str, Any]:
    """Return the fields that a curriculum sets at a level; attributes with fewer levels stay at their last."""
    placed = curriculum()
    placed.set_global_level(level)
    configuration = placed.generate_configuration()
    names = ("field_name", "lower_field_name", "upper_field_name")
    fields = [getattr(attribute, name, None) for attribute in placed.attributes.values() for name in names]
    return {field: getattr(configuration, field) for field in fields if field}


def _accepted(config: type, values: Mapping[str, Any]) -> bool:
    """Return True if a configuration accepts these values; some curricula have levels that their tasks refuse."""
    try:
        configuration = config(**values)
        if hasattr(configuration, "validate"):
            configuration.validate()
    except (AssertionError, ValueError, TypeError):
        return False
    return True


def _help(attributes: list[tuple[str, list[Any]]], refused: list[str]) -> str:
    fields = "; ".join(f"{name} {', '.join(map(str, levels))}" for name, levels in attributes)
    text = f"0: as configured; n: the n-th level of its curriculum, which sets {fields}"
    text = text if len(text) <= _LONGEST_HELP else text[:_LONGEST_HELP].rpartition(";")[0] + "; ..."
    return f"{text} (its level {', '.join(refused)} is refused by its configuration)" if refused else text
