"""Dotted fields of the configuration: what an agent may name, and what a value for it must be.

Agents send values as they come to them: "1e-5", "true", 8, "null". A field knows its own type and accepts what can mean
only one thing; everything else is refused with what would be accepted. The fields are read off the schema, so that a
field added there is listed, coerced and bounded here without a second list to keep. An environment's own settings
(`environment.knobs.<name>`) are fields too, made from the knobs on its card.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from toprope.errors import InvalidValue, LockedField, NotFound
from toprope.settings.algorithms import NAME, implied
from toprope.settings.schema import Config
from toprope.settings.value_text import say, short

__all__ = ["Change", "Field", "KNOBS", "LockCheck", "all_fields", "apply", "find_field", "get_value", "knob_fields"]

KNOBS = "environment.knobs"
"""Prefix of an environment's own settings."""

NOT_EDITABLE = {"environment.name": "select_environment makes a draft of another environment"}
"""Fields that identify a draft, and what to do instead of editing them."""

Kind = Literal["boolean", "integer", "number", "text", "list", "object", "any"]

_KINDS: dict[type, Kind] = {
    bool: "boolean", int: "integer", float: "number", str: "text", list: "list", dict: "object", tuple: "list",
}  # fmt: skip
_KNOB_KINDS: dict[str, Kind] = {
    "bool": "boolean", "boolean": "boolean", "int": "integer", "integer": "integer", "float": "number",
    "number": "number", "str": "text", "string": "text", "text": "text", "list": "list", "tuple": "list",
    "array": "list", "dict": "object", "object": "object",
}  # fmt: skip
_NULLS = frozenset({"null", "none"})
_LARGEST_EXACT = 2**53


class LockCheck(Protocol):
    """What `apply` needs of the owner's locks."""

    def refusal(self, field: str, value: Any) -> str | None:
        """A sentence with the owner's reason where `value` is not allowed for `field`, else None."""


@dataclass(frozen=True)
class Field:
    """One dotted field: type, bounds, default and meaning."""

    name: str
    kind: Kind
    default: Any
    description: str = ""
    nullable: bool = False
    choices: tuple[Any, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    item: Kind | None = None
    """Kind of a list's items or an object's values, where the schema says it."""

    @property
    def type_text(self) -> str:
        """The type in a word or two, as an answer shows it."""
        text = "choice" if self.choices is not None else self.kind
        if self.item is not None:
            text += f" of {self.item}"
        return f"{text} or null" if self.nullable else text

    @property
    def bounds(self) -> str:
        """Bounds or choices as short text; empty where there are none."""
        if self.choices is not None:
            return ", ".join(say(choice) for choice in self.choices)
        parts = []
        if self.ge is not None or self.gt is not None:
            parts.append(f">= {say(self.ge)}" if self.ge is not None else f"> {say(self.gt)}")
        if self.le is not None or self.lt is not None:
            parts.append(f"<= {say(self.le)}" if self.le is not None else f"< {say(self.lt)}")
        if self.min_length:
            parts.append("not empty" if self.min_length == 1 else f"at least {self.min_length} long")
        if self.max_length is not None:
            parts.append(f"at most {self.max_length} long")
        return ", ".join(parts)

    def coerce(self, value: Any) -> Any:
        """The value in this field's own type.

        Raises:
            InvalidValue: It cannot mean one, or is out of bounds; the message says what would be accepted.
        """
        if self.name.startswith(KNOBS) and type(value) is type(self.default) and value == self.default:
            return value  # what an environment itself has as a default is its own affair
        try:
            result = self._typed(value)
            self._check(result)
        except (ValueError, TypeError, RecursionError, OverflowError):
            raise InvalidValue(f"{self.name}: {short(value)} is not {self._accepted()}.") from None
        return result

    def _accepted(self) -> str:
        if self.choices is not None:
            text = f"one of {self.bounds}"
            return f"{text} or null" if self.nullable else text
        text = {
            "boolean": "true or false",
            "integer": "a whole number",
            "number": "a number",
            "text": "a text",
            "list": 'a list such as ["a", "b"]' if self.item in (None, "text") else "a list such as [1, 2]",
            "object": 'an object such as {"name": 1}',
            "any": "a JSON value",
        }[self.kind]
        if self.nullable:
            text += " or null"
        return f"{text} ({self.bounds})" if self.bounds else text

    def _typed(self, value: Any) -> Any:
        if value is None or (self.nullable and isinstance(value, str) and value.strip().lower() in _NULLS):
            if not self.nullable:
                raise ValueError
            return None
        if self.choices is not None:
            return self._choice(value)
        return _typed(self.kind, self.item, value)

    def _choice(self, value: Any) -> Any:
        for choice in self.choices or ():
            if type(value) is type(choice) and value == choice:
                return choice
        text = str(value).strip().lower()
        for choice in self.choices or ():
            if not isinstance(value, bool | list | dict) and text == str(choice).lower():
                return choice
        raise ValueError

    def _check(self, value: Any) -> None:
        if value is None:
            return
        if self.kind in ("integer", "number") and self.choices is None:
            if (
                (self.ge is not None and value < self.ge)
                or (self.gt is not None and value <= self.gt)
                or (self.le is not None and value > self.le)
                or (self.lt is not None and value >= self.lt)
            ):
                raise ValueError
        if self.kind in ("text", "list", "object"):
            size = len(value)
            if size < (self.min_length or 0) or (self.max_length is not None and size > self.max_length):
                raise ValueError


@dataclass(frozen=True)
class Change:
    """One field's value before and after an edit."""

    field: str
    before: Any
    after: Any


def _typed(kind: Kind, item: Kind | None, value: Any) -> Any:
    if kind == "text":
        if not isinstance(value, str):
            raise TypeError
        return value
    if kind == "boolean":
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in ("true", "false"):
            raise ValueError
        return word == "true"
    if kind in ("integer", "number"):
        return _number(kind, value)
    if kind == "any":
        return _any(value)
    parsed = json.loads(value) if isinstance(value, str) else value
    if kind == "list":
        if not isinstance(parsed, list | tuple):
            raise TypeError
        return [_typed(item, None, one) if item else one for one in parsed]
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise TypeError
    return {key: _typed(item, None, one) if item else one for key, one in parsed.items()}


def _any(value: Any) -> Any:
    """A text that is JSON becomes what it says; the environment itself judges the value when it is opened."""
    if isinstance(value, str):
        try:
            return json.loads(value, parse_constant=_no_constant)
        except ValueError:
            return value
    json.dumps(value, allow_nan=False)
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(word)


def _number(kind: Kind, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    if isinstance(value, str):
        text = value.strip()
        # Python reads "1_000" and "１" as numbers; a configuration should not.
        if not text.isascii() or "_" in text:
            raise ValueError
        try:
            value = int(text)
        except ValueError:
            value = float(text)
    if not math.isfinite(value):
        raise ValueError
    if kind == "number":
        return float(value)
    if isinstance(value, float):
        if not value.is_integer() or abs(value) > _LARGEST_EXACT:
            raise ValueError
        value = int(value)
    return value


def _from_annotation(annotation: Any) -> tuple[Kind, bool, tuple[Any, ...] | None, Kind | None]:
    """Kind, nullable, choices and item kind of a type of the schema."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"a field of the configuration has one type or null, not {annotation}")
        kind, _, choices, item = _from_annotation(inner[0])
        return kind, type(None) in get_args(annotation), choices, item
    if origin is Literal:
        choices = get_args(annotation)
        return _KINDS[type(choices[0])], False, choices, None
    if origin in (list, dict):
        last = get_args(annotation)[-1]
        return _KINDS[origin], False, None, None if last is Any else _KINDS[last]
    if annotation in _KINDS:
        return _KINDS[annotation], False, None, None
    raise TypeError(f"no rule for a field of type {annotation}")


def _from_schema(name: str, info: FieldInfo) -> Field:
    kind, nullable, choices, item = _from_annotation(info.annotation)
    limits: dict[str, Any] = {}
    for entry in info.metadata:
        for key in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            if isinstance(entry, annotated_types.BaseMetadata) and getattr(entry, key, None) is not None:
                limits[key] = getattr(entry, key)
    return Field(
        name=name,
        kind=kind,
        default=info.get_default(call_default_factory=True),
        description=info.description or "",
        nullable=nullable,
        choices=choices,
        item=item,
        **limits,
    )


@functools.cache
def _of_schema() -> dict[str, Field | None]:
    """The schema's fields by dotted name; None where the environment's own settings come."""
    fields: dict[str, Field | None] = {}
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel), f"{section} is not a model"
        for name, field in ((f"{section}.{name}", field) for name, field in model.model_fields.items()):
            fields[name] = None if name == KNOBS else _from_schema(name, field)
    return fields


def all_fields(knobs: Iterable[Mapping[str, Any]] = ()) -> dict[str, Field]:
    """Every field by its dotted name, in the schema's order, the environment's own settings within `environment`.

    Args:
        knobs: The knobs on the environment's card: mappings with `name`, `type`, `default`, `description`, `ge`, `le`,
            `choices`, all but the name optional.
    """
    fields: dict[str, Field] = {}
    for name, field in _of_schema().items():
        fields.update(knob_fields(knobs) if field is None else {name: field})
    return fields


def knob_fields(knobs: Iterable[Mapping[str, Any]]) -> dict[str, Field]:
    """The fields of an environment's own settings. A knob without a type takes its default's."""
    fields = {}
    for knob in knobs:
        default, choices = knob.get("default"), knob.get("choices")
        words = {word.split("[")[0].strip() for word in str(knob.get("type") or "").lower().split("|")}
        nullable = default is None or bool(words & {"null", "none"})
        words -= {"null", "none"}
        # "int | float" is a number; any other union, and a word that is not known, is for the environment to judge.
        kinds = {_KNOB_KINDS.get(word, "any") for word in words}
        kind = "number" if kinds == {"integer", "number"} else kinds.pop() if len(kinds) == 1 else "any"
        if kind == "any" and words == {""}:
            kind = _KINDS.get(type(default), "any")
        name = f"{KNOBS}.{knob['name']}"
        fields[name] = Field(
            name=name,
            kind=kind,
            default=default,
            description=str(knob.get("description") or ""),
            nullable=nullable,
            choices=tuple(choices) if choices else None,
            ge=knob.get("ge"),
            le=knob.get("le"),
        )
    return fields


def find_field(name: str, fields: Mapping[str, Field]) -> Field:
    """The field of that dotted name.

    Raises:
        NotFound: There is none; the message names the nearest.
    """
    if name in fields:
        return fields[name]
    if name == KNOBS or any(known.startswith(f"{name}.") for known in fields):
        inside = [known for known in fields if known.startswith(f"{name}.")]
        raise NotFound(
            f"{name} is a section, not a field.",
            hint=f"Its fields: {', '.join(inside)}." if inside else "This environment has no settings of its own.",
        )
    last = name.rsplit(".", 1)[-1]
    near = [known for known in fields if known.rsplit(".", 1)[-1] == last]
    near += [known for known in difflib.get_close_matches(name, fields, n=3, cutoff=0.6) if known not in near]
    if not near:
        ends = {known.rsplit(".", 1)[-1]: known for known in fields}
        near = [ends[end] for end in difflib.get_close_matches(last, ends, n=3, cutoff=0.6)]
    hint = f"Did you mean {' or '.join(near[:3])}?" if near else "get_config lists the fields there are."
    raise NotFound(f"There is no field {short(name)}.", hint=hint)


def get_value(config: Config, field: Field) -> Any:
    """The value that the configuration has for a field; a knob that was never set has its default."""
    if field.name.startswith(f"{KNOBS}."):
        return config.environment.knobs.get(field.name.removeprefix(f"{KNOBS}."), field.default)
    section, _, name = field.name.partition(".")
    return getattr(getattr(config, section), name)


def apply(
    config: Config,
    changes: Mapping[str, Any],
    knobs: Iterable[Mapping[str, Any]] = (),
    locks: LockCheck | None = None,
) -> tuple[Config, list[Change]]:
    """A copy of the configuration with all changes, and those fields that now differ. All or nothing.

    Args:
        config: Left as it is.
        changes: Values by dotted field name, in any form that `Field.coerce` accepts.
        knobs: The knobs on the environment's card.
        locks: The owner's locks; a value that they do not allow is refused with the owner's reason.

    Raises:
        NotFound, LockedField, InvalidValue: Nothing was changed. The message lists every problem, not the first alone;
            the class is that of the problems where they are of one kind, else InvalidValue.
    """
    fields = all_fields(knobs)
    data = config.model_dump()
    if str(changes.get(NAME, config.algorithm.name)).strip().lower() != config.algorithm.name:
        changes = {
            **changes,
            **implied(changes, lambda name, value: locks is None or locks.refusal(name, value) is None),
        }
    changed: list[Change] = []
    problems: list[InvalidValue | NotFound] = []
    for name, value in changes.items():
        try:
            field = find_field(name, fields)
            if name in NOT_EDITABLE:
                raise InvalidValue(f"{name} cannot be edited: {NOT_EDITABLE[name]}.")
            typed = _allowed(field, value, locks)
        except (InvalidValue, NotFound) as problem:
            problems.append(problem)
            continue
        before = get_value(config, field)
        if before != typed or type(before) is not type(typed):
            changed.append(Change(name, before, typed))
        target = data
        *path, last = [*KNOBS.split("."), name.removeprefix(f"{KNOBS}.")] if name.startswith(KNOBS) else name.split(".")
        for part in path:
            target = target[part]
        target[last] = typed
    if not problems:
        result = _validated(data, problems)
        if result is not None and changed:
            # Conflicts that were there before the edit are told by get_config and at the start, and do not block it.
            problems += [InvalidValue(text) for text in result.conflicts() if text not in config.conflicts()]
        if not problems and result is not None:
            return result, changed
    if len(problems) == 1:
        raise problems[0]
    kinds = {type(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else InvalidValue
    raise kind(f"{len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems))


def _allowed(field: Field, value: Any, locks: LockCheck | None) -> Any:
    """The value in the field's own type, if the owner allows it. For a locked field the owner's reason is told before
    anything else: which values would be of the right type is of no use there."""
    try:
        typed = field.coerce(value)
    except InvalidValue:
        if locks is not None and (refusal := locks.refusal(field.name, value)):
            raise LockedField(refusal) from None
        raise
    if locks is not None and (refusal := locks.refusal(field.name, typed)):
        raise LockedField(refusal)
    return typed


def _validated(data: dict[str, Any], problems: list[InvalidValue | NotFound]) -> Config | None:
    """The model of the data; what the model refuses though its fields accepted it is added to the problems."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            said = entry["msg"].removeprefix("Value error, ").rstrip(".")
            problems.append(InvalidValue(f"{'.'.join(map(str, entry['loc']))}: {said}."))
        return None
