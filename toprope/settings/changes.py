"""Edits of a configuration: several fields at once, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from toprope.errors import InvalidValue, LockedField, NotFound
from toprope.settings.fields import KIND_OF_TYPE, KNOBS, Field, all_fields, find_field, get_value
from toprope.settings.schema import SECTIONS, Config
from toprope.settings.sections.algorithms import NAME, implied_fields

NOT_EDITABLE = {"environment.name": "select_environment makes a draft of another environment"}
"""Fields that identify a draft, and what to do instead of editing them."""


class LockCheck(Protocol):
    """The part of the owner's locks that `apply` needs."""

    def refusal(self, field: str, value: Any) -> str | None:
        """The owner's reason if `value` is not allowed for `field`, else None."""


@dataclass(frozen=True)
class Change:
    """One field's value before and after an edit."""

    field: str
    before: Any
    after: Any


def apply_changes(
    config: Config,
    changes: Mapping[str, Any],
    knobs: Iterable[Mapping[str, Any]] = (),
    locks: LockCheck | None = None,
    *,
    implied: bool = True,
) -> tuple[Config, list[Change]]:
    """A copy of the configuration with all changes, and the fields that now differ. All or nothing.

    Args:
        config: Left as it is.
        changes: Values by dotted field name, in any form that `Field.coerce` accepts.
        knobs: The knobs on the environment's card.
        locks: The owner's locks; a value that they do not allow is refused with the owner's reason.
        implied: Let a change of `algorithm.name` set the fields that it implies. An earlier configuration is restored
            without, because they may have been edited since.

    Raises:
        NotFound, LockedField, InvalidValue: Nothing was changed. The message lists every problem; the class is that of
            the problems if they are of one kind, else InvalidValue.
    """
    fields = all_fields(knobs)
    if implied and str(changes.get(NAME, config.algorithm.name)).strip().lower() != config.algorithm.name:
        changes = {
            **changes,
            **implied_fields(changes, lambda name, value: locks is None or locks.refusal(name, value) is None),
        }
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    set_knobs = dict(config.environment.knobs)
    changed: list[Change] = []
    problems: list[InvalidValue | NotFound] = []
    for name, value in changes.items():
        try:
            field = find_field(name, fields)
            if name in NOT_EDITABLE:
                raise InvalidValue(f"{name} cannot be edited: {NOT_EDITABLE[name]}.")
            typed = _require_allowed(field, value, locks)
        except (InvalidValue, NotFound) as problem:
            problems.append(problem)
            continue
        before = get_value(config, field)
        if before != typed or type(before) is not type(typed):
            changed.append(Change(name, before, typed))
        if name.startswith(f"{KNOBS}."):
            set_knobs[name.removeprefix(f"{KNOBS}.")] = typed
        else:
            section, _, key = name.partition(".")
            values[section][key] = typed
    values["environment"]["knobs"] = set_knobs
    sections = {name: getattr(config, name).model_copy(deep=True, update=values[name]) for name in SECTIONS}
    result = config.model_copy(update=sections)
    if not problems and changed:
        # Conflicts from before the edit are shown by get_config and at the start; they do not block this edit.
        problems += [InvalidValue(text) for text in result.conflicts() if text not in config.conflicts()]
    if not problems:
        return result, changed
    if len(problems) == 1:
        raise problems[0]
    kinds = {type(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else InvalidValue
    raise kind(f"{len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems))


def _require_allowed(field: Field, value: Any, locks: LockCheck | None) -> Any:
    """The value in the field's own type, if the owner allows it.

    Of a value that the field does not accept, the owner's reason is told only if its type is right.
    """
    try:
        typed = field.coerce(value)
    except InvalidValue:
        kind = KIND_OF_TYPE.get(type(value))
        of_its_kind = kind == field.kind or (kind, field.kind) == ("integer", "number")
        if of_its_kind and locks is not None and (refusal := locks.refusal(field.name, value)):
            raise LockedField(refusal) from None
        raise
    if locks is not None and (refusal := locks.refusal(field.name, typed)):
        raise LockedField(refusal)
    return typed
