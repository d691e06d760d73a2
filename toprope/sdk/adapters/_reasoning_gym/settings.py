"""Knobs, reward parts and constants that single tasks and mixtures of reasoning-gym share."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any, Literal

from toprope.sdk.adapters._reasoning_gym.levels import Levels
from toprope.sdk.authoring.environment import Part
from toprope.sdk.authoring.knobs import knob, settable

__all__ = ["COMPOSITE", "KEYS", "difficulty_of", "parts_of", "settings_of"]

KEYS = ("tasks", "name", "description")
"""Keys of a mixture's target; an owner's YAML file may have them too."""
COMPOSITE = "composite"
"""Registered in reasoning-gym, but empty without a list of tasks: see `composite`."""
_HIDDEN = ("seed", "size", "data_file")
"""Fields that are not settings of a task; `data_file` names a file to read."""
_WEIGHTS = {"exact": (1.0, 0.0), "partial": (0.0, 1.0), "both": (0.5, 0.5)}
_COMMENT = re.compile(r"^\s+(\w+)\s*:[^#]*#\s*(.+?)\s*$", re.MULTILINE)


def parts_of(scoring: str) -> dict[str, Part]:
    """Return the reward parts for a value of the knob `scoring`."""
    exact, partial = _WEIGHTS[scoring]
    return {
        "exact": Part(exact, description="1 when reasoning-gym calls the answer entirely right"),
        "partial": Part(partial, description="reasoning-gym's own score, with its partial credit"),
    }


def difficulty_of(config: type) -> str:
    """Return the name of the curriculum knob: `difficulty`, or `level` if the task has a field `difficulty`."""
    return "level" if any(field.name == "difficulty" for field in dataclasses.fields(config)) else "difficulty"


def settings_of(config: type, levels: Levels | None) -> type:
    """Return a dataclass of our knobs and of the configuration's fields with JSON values."""
    try:
        hints = typing.get_type_hints(config)
    except Exception:  # An annotation cannot be resolved: use the plain types.
        hints = {field.name: field.type for field in dataclasses.fields(config)}
    try:
        comments = dict(_COMMENT.findall(inspect.getsource(config)))
    except OSError:
        comments = {}
    fields: list[tuple[str, Any, Any]] = [
        (
            "scoring",
            Literal["exact", "partial", "both"],
            knob("partial", help="what is rewarded: right answers alone, reasoning-gym's own score, or half of each"),
        )
    ]
    if levels is not None:
        fields.append((difficulty_of(config), int, knob(0, ge=0, le=levels.count, help=levels.help)))
    for field in dataclasses.fields(config):
        hint = hints.get(field.name, Any)
        if field.name in _HIDDEN or not field.init or not settable(hint):
            continue
        default = field.default
        if default is dataclasses.MISSING:
            if field.default_factory is dataclasses.MISSING:
                continue
            default = field.default_factory()
        fields.append((field.name, hint, knob(default, help=comments.get(field.name, ""))))
    return dataclasses.make_dataclass("Knobs", fields)
