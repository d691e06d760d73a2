"""Mixtures of reasoning-gym's tasks: `composite`, whose knob `tasks` says of what, with which weights and settings.

    "tasks": [{"name": "chain_sum", "weight": 2, "knobs": {"max_terms": 3}},
              {"name": "gcd", "knobs": {"difficulty": 1}}]

reasoning-gym's own CompositeDataset draws and scores. The knob `difficulty` moves all tasks that have a curriculum; one
that says its own difficulty keeps it. A target that is a JSON object, `{"tasks": ..., "name": ..., "description":
...}`, is a mixture of its own name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from toprope.sdk.adapters._reasoning_gym.entries import SEED, EntryEnvironment, parts_of, scoring
from toprope.sdk.adapters._reasoning_gym.levels import levels_of
from toprope.sdk.adapters._reasoning_gym.loading import task_classes, task_names
from toprope.sdk.adapters._reasoning_gym.settings import COMPOSITE, KEYS, difficulty_of, settings_of, size_of
from toprope.sdk.adapters._shared.user_files import parsed
from toprope.sdk.authoring.environment import is_finite
from toprope.sdk.authoring.knobs import knob, make_knobs, nearest
from toprope.sdk.errors import InvalidRequest, LoadError

__all__ = ["Composite", "make"]

_HARDEST = 20
_FIRST = ("chain_sum", "gcd", "spell_backward")
"""Default members of a mixture."""
_MEMBER = ("name", "weight", "knobs")


class Composite(EntryEnvironment):
    """A mixture of tasks of reasoning-gym, by weight."""

    tags = (COMPOSITE, "mixture")
    _most_gaps = 10_000

    def __init__(self, target: Mapping[str, Any]) -> None:
        self.name = str(target.get("name") or f"reasoning_gym/{COMPOSITE}")
        self.__doc__ = str(target.get("description") or type(self).__doc__)
        self.parts = parts_of("partial")
        members = target.get("tasks") or [{"name": name} for name in _FIRST]
        fields: list[tuple[str, Any, Any]] = [
            ("tasks", list[dict[str, Any]],
             knob(members, help="each {name, weight, knobs}; weight 1 and no knobs by default")),
            scoring(),
            ("difficulty", int,
             knob(0, ge=0, le=_HARDEST, help="0: as each task says; n: level n of each one's curriculum, or its last")),
        ]  # fmt: skip
        self.Knobs = dataclasses.make_dataclass("Knobs", fields)

    def setup(self) -> None:
        self.parts = parts_of(self.knobs.scoring)
        if not self.knobs.tasks:
            raise InvalidRequest(f"{self.name} needs a task at least in its knob `tasks`: [{{'name': 'gcd'}}].")
        members = [self._member(member) for member in self.knobs.tasks]
        # The members' own modules are imported by now, so that this does not import all tasks.
        from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec

        try:
            config = CompositeConfig(seed=SEED, datasets=[DatasetSpec(*member) for member in members])
            config.validate()
            self._dataset = CompositeDataset(config)
        except (AssertionError, ValueError, TypeError) as error:
            raise InvalidRequest(f"{self.name} refuses these tasks: {error}") from error

    def _member(self, member: Mapping[str, Any]) -> tuple[str, float, dict[str, Any]]:
        """One task as reasoning-gym's composite is told of it: name, weight, fields of its configuration."""
        for key in member:
            if key not in _MEMBER:
                raise InvalidRequest(f"A task of {self.name} has no {key!r}. {nearest(str(key), _MEMBER, 'Keys')}")
        name, weight, knobs = member.get("name"), member.get("weight", 1.0), member.get("knobs") or {}
        classes = task_classes(str(name))
        if classes is None:
            raise InvalidRequest(f"reasoning-gym has no task {name!r}. {nearest(str(name), task_names(), 'Tasks')}")
        if not is_finite(weight) or weight <= 0:
            raise InvalidRequest(f"The weight of {name} must be a number above 0, not {weight!r}.")
        if not isinstance(knobs, Mapping):
            raise InvalidRequest(f"The knobs of {name} must be an object of settings, not {knobs!r}.")
        config = classes[1]
        levels = levels_of(str(name), config)
        try:
            set_knobs = make_knobs(settings_of(config, levels), knobs)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}") from None
        values = {field.name: getattr(set_knobs, field.name) for field in dataclasses.fields(set_knobs)}
        del values["scoring"]
        if levels is not None:
            difficulty = values.pop(difficulty_of(config))
            values = levels.values(difficulty or min(self.knobs.difficulty, levels.count), values)
        return str(name), float(weight), values | size_of(str(name))


def make(target: str) -> Composite:
    """The mixture of a target. See the module.

    Raises:
        LoadError: Not a valid target.
    """
    if target == COMPOSITE:
        return Composite({})
    settings = parsed(target, "a mixture", KEYS)
    if not isinstance(settings.get("tasks"), list) or not all(isinstance(member, dict) for member in settings["tasks"]):
        raise LoadError("The target of a mixture needs `tasks`, a list of {name, weight, knobs}.")
    return Composite(settings)
