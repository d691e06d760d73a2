"""Knobs and constants that single tasks and mixtures of reasoning-gym share."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

from toprope.sdk.adapters._reasoning_gym.entries import scoring
from toprope.sdk.adapters._reasoning_gym.levels import Levels
from toprope.sdk.authoring.knobs import default_of, is_required, knob, settable

__all__ = ["COMPOSITE", "KEYS", "difficulty_of", "settings_of", "size_of"]

KEYS = ("tasks", "name", "description")
"""Keys of a mixture's target; an owner's YAML file may have them too."""
COMPOSITE = "composite"
"""Registered in reasoning-gym, but empty without a list of tasks: see `composite`."""
_HIDDEN = ("seed", "size", "data_file")
"""Fields that are not settings of a task; `data_file` names a file to read."""
_SIZED = ("gsm_symbolic", "list_functions")
"""Tasks that choose in advance of which kind each of their `size` entries is; the first ones stay the same."""
_COMMENT = re.compile(r"^\s+(\w+)\s*:[^#]*#\s*(.+?)\s*$", re.MULTILINE)


def difficulty_of(config: type) -> str:
    """Return the name of the curriculum knob: `difficulty`, or `level` if the task has a field `difficulty`."""
    return "level" if any(field.name == "difficulty" for field in dataclasses.fields(config)) else "difficulty"


def size_of(name: str) -> dict[str, int]:
    """Return the field `size` of the configuration of a task whose entries end there."""
    return {"size": 100_000} if name in _SIZED else {}


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
    fields = [scoring()]
    if levels is not None:
        fields.append((difficulty_of(config), int, knob(0, ge=0, le=levels.count, help=levels.help)))
    for field in dataclasses.fields(config):
        hint = hints.get(field.name, Any)
        if field.name in _HIDDEN or not field.init or is_required(field) or not settable(hint):
            continue
        fields.append((field.name, hint, knob(default_of(field), help=comments.get(field.name, ""))))
    return dataclasses.make_dataclass("Knobs", fields)
