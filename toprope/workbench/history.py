"""Compare configurations: a draft at any revision, a run, or a preset.

History is never rewritten. A revision is reconstructed by undoing later edits in memory; restoring one is a new edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.errors import InvalidValue, NotFound
from toprope.settings.changes import Change, apply_changes
from toprope.settings.fields import KNOBS, all_fields, get_value
from toprope.settings.presets import Preset
from toprope.settings.schema import Config


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    """Name of the side: `draft-7f3k@3`, a run id, `preset cpu-embedded`."""
    environment: str
    preset: str | None
    config: Config


def values_of(config: Config) -> dict[str, Any]:
    """Values by dotted name, knobs last."""
    values = {name: get_value(config, field) for name, field in all_fields().items()}
    return values | {f"{KNOBS}.{name}": value for name, value in config.environment.knobs.items()}


def difference(a: Config, b: Config) -> list[Change]:
    """Return the differing fields in the schema's order; None for a missing knob."""
    first, second = values_of(a), values_of(b)
    names = [*first, *(name for name in second if name not in first)]
    return [
        Change(name, first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name) or type(first.get(name)) is not type(second.get(name))
    ]


def taken_back(
    config: Config, edits: Sequence[tuple[int, Sequence[Change]]], revision: int, knobs: Iterable[Mapping[str, Any]]
) -> Config:
    """Return the configuration at an earlier revision.

    Args:
        config: The present configuration.
        edits: Resulting revision and changes of each edit, oldest first.
        revision: Revision, from 1 for the new draft.
        knobs: Knobs on the environment's card.

    Raises:
        NotFound: Unknown revision.
    """
    newest = edits[-1][0] if edits else 1
    if not 1 <= revision <= newest:
        raise NotFound(f"There is no revision {revision}.", hint=f"There are 1 to {newest}; get_config lists them.")
    former: dict[str, Any] = {}
    for led_to, changes in reversed(edits):
        if led_to > revision:
            former |= {change.field: change.before for change in changes}
    return apply_changes(config, former, knobs, implied=False)[0]


def config_of_preset(preset: Preset, environment: str) -> Config:
    """Return a preset's values for an environment, knobs included."""
    config = preset.config(environment)
    config.environment.knobs = dict(preset.knobs(environment))
    return config


def beside_preset(config: Config, preset: Preset | None, environment: str) -> dict[str, list[Any]]:
    """Return the fields that differ from the preset, with the preset's value and the present one.

    Knobs that the preset does not set are left out: they have defaults or appear in an edit.
    """
    if preset is None:
        return {}
    try:
        base = config_of_preset(preset, environment)
    except (InvalidValue, NotFound):
        return {}
    preset_knobs = {f"{KNOBS}.{name}" for name in base.environment.knobs}
    return {
        change.field: [change.before, change.after]
        for change in difference(base, config)
        if not change.field.startswith(f"{KNOBS}.") or change.field in preset_knobs
    }
