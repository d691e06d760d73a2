"""Dotted fields of the configuration (`rollout.group_size`): their types, bounds, defaults and meanings.

The fields are read from the schema, so a field added there is listed and checked here without a second list. An
environment's own settings (`environment.knobs.<name>`) are fields too, built from the knobs on its card. An edited
value is checked once, by pydantic against the field's annotation.
"""

from __future__ import annotations

import difflib
import functools
import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, TypeAdapter, ValidationError

from toprope.errors import InvalidValue, NotFound
from toprope.settings.field_types import card_type, reader
from toprope.settings.schema import Config
from toprope.text_format import short_json

KNOBS = "environment.knobs"
"""Prefix of an environment's own settings."""

Kind = Literal["boolean", "integer", "number", "text", "list", "object", "any"]

KIND_OF_TYPE: dict[Any, Kind] = {
    bool: "boolean", int: "integer", float: "number", str: "text", list: "list", tuple: "list", dict: "object",
}  # fmt: skip
_LIMITS = ("ge", "gt", "le", "lt", "min_length", "max_length")


@dataclass(frozen=True)
class Field:
    """One dotted field.

    Args:
        name: Dotted name.
        annotation: The type of its values without null, as the schema or the environment's card declares it.
        default: Its value if nobody sets it.
        description: One or two sentences for an agent.
        nullable: Whether null is a value.
        metadata: Constraints and validators, as in `Annotated`.
        choices: The only values; None if there are others.
    """

    name: str
    annotation: Any
    default: Any
    description: str = ""
    nullable: bool = False
    metadata: tuple[Any, ...] = ()
    choices: tuple[Any, ...] | None = None

    @property
    def kind(self) -> Kind:
        """The JSON type of its values."""
        if self.choices is not None and self.annotation is Any:
            return KIND_OF_TYPE.get(type(self.choices[0]), "any")
        return KIND_OF_TYPE.get(get_origin(self.annotation) or self.annotation, "any")

    @property
    def type_text(self) -> str:
        """The type in a word or two, as an answer shows it."""
        text: str = "choice" if self.choices is not None else self.kind
        if self._item is not None:
            text += f" of {self._item}"
        return f"{text} or null" if self.nullable else text

    @property
    def bounds(self) -> str:
        """Bounds or choices as short text; empty if there are none."""
        if self.choices is not None:
            return ", ".join(_say(choice) for choice in self.choices)
        limits: dict[str, Any] = {}
        for entry in self.metadata:
            if isinstance(entry, annotated_types.BaseMetadata):
                limits |= {key: value for key in _LIMITS if (value := getattr(entry, key, None)) is not None}
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        parts = [f"{sign} {_say(limits[key])}" for key, sign in signs.items() if key in limits]
        if least := limits.get("min_length"):
            parts.append("not empty" if least == 1 else f"at least {least} long")
        if "max_length" in limits:
            parts.append(f"at most {limits['max_length']} long")
        return ", ".join(parts)

    def coerce(self, value: Any) -> Any:
        """The value in this field's own type.

        Raises:
            InvalidValue: It does not fit the type or is out of bounds; the message says what is accepted.
        """
        if self.name.startswith(KNOBS) and type(value) is type(self.default) and value == self.default:
            return value  # an environment may have a default outside its own bounds
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            if problem["type"] == "value_error":  # of a validator in the schema, which says more than the type
                reason = problem["msg"].removeprefix("Value error, ").rstrip(".")
                raise InvalidValue(f"{self.name}: {reason}.") from None
        except (RecursionError, OverflowError):
            pass
        raise InvalidValue(f"{self.name}: {short_json(value)} is not {self._accepted()}.")

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return reader(self.annotation, nullable=self.nullable, choices=self.choices, metadata=self.metadata)

    @property
    def _item(self) -> Kind | None:
        """Kind of a list's items or an object's values, if it is declared."""
        arguments = get_args(self.annotation)
        return KIND_OF_TYPE.get(arguments[-1]) if arguments and self.choices is None else None

    def _accepted(self) -> str:
        if self.choices is not None:
            text = f"one of {self.bounds}"
            return f"{text} or null" if self.nullable else text
        text = {
            "boolean": "true or false",
            "integer": "a whole number",
            "number": "a number",
            "text": "a text",
            "list": 'a list such as ["a", "b"]' if self._item in (None, "text") else "a list such as [1, 2]",
            "object": 'an object such as {"name": 1}',
            "any": "a JSON value",
        }[self.kind]
        if self.bounds and self.kind in ("integer", "number"):
            text += f" {self.bounds.replace(', ', ' and ')}"
        elif self.bounds:
            text += f" ({self.bounds})"
        return f"{text} or null" if self.nullable else text


@functools.cache
def _schema_fields() -> dict[str, Field | None]:
    """The schema's fields by dotted name; None in place of the environment's own settings."""
    fields: dict[str, Field | None] = {}
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel), f"{section} is not a model"
        for short, field in model.model_fields.items():
            name = f"{section}.{short}"
            if name == KNOBS:
                fields[name] = None
                continue
            parts = (
                get_args(field.annotation) if get_origin(field.annotation) is types.UnionType else [field.annotation]
            )
            [annotation] = [part for part in parts if part is not type(None)]
            choices = get_args(annotation) if get_origin(annotation) is Literal else None
            fields[name] = Field(
                name=name,
                annotation=annotation if choices is None else type(choices[0]),
                default=field.get_default(call_default_factory=True),
                description=field.description or "",
                nullable=len(parts) > 1,
                metadata=tuple(field.metadata),
                choices=choices,
            )
    return fields


def all_fields(knobs: Iterable[Mapping[str, Any]] = ()) -> dict[str, Field]:
    """Every field by its dotted name, in the schema's order, with the environment's own settings inside `environment`.

    Args:
        knobs: The knobs on the environment's card: mappings with `name`, `type`, `default`, `description`, `ge`, `le`,
            `choices`, all but the name optional.
    """
    fields: dict[str, Field] = {}
    for name, field in _schema_fields().items():
        fields.update(knob_fields(knobs) if field is None else {name: field})
    return fields


def knob_fields(knobs: Iterable[Mapping[str, Any]]) -> dict[str, Field]:
    """The fields of an environment's own settings. A knob without a type takes the type of its default."""
    fields = {}
    for knob in knobs:
        default, choices = knob.get("default"), knob.get("choices")
        declared = str(knob.get("type") or "").strip() or type(default).__name__
        annotation, nullable = card_type(declared)
        limits: dict[str, Any] = {"ge": annotated_types.Ge, "le": annotated_types.Le}
        name = f"{KNOBS}.{knob['name']}"
        fields[name] = Field(
            name=name,
            annotation=annotation,
            default=default,
            description=str(knob.get("description") or ""),
            nullable=nullable or default is None,
            metadata=tuple(
                limit(knob[key])
                for key, limit in limits.items()
                if annotation in (int, float) and not choices and knob.get(key) is not None
            ),
            choices=tuple(choices) if choices else None,
        )
    return fields


def knob_problems(config: Config, fields: Mapping[str, Field]) -> list[str]:
    """Sentences about knobs of a configuration that do not fit the environment's card; empty if all fit."""
    problems = []
    for name, field in fields.items():
        if name.startswith(f"{KNOBS}."):
            try:
                field.coerce(get_value(config, field))
            except InvalidValue as problem:
                problems.append(str(problem))
    return problems


def _say(value: Any) -> str:
    """The value as one would type it: text without quotes, whole numbers without a point."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False, default=str)


def find_field(name: str, fields: Mapping[str, Field]) -> Field:
    """The field of that dotted name.

    Raises:
        NotFound: No field has it; the message names the nearest.
    """
    if name in fields:
        return fields[name]
    if name == KNOBS or any(field_name.startswith(f"{name}.") for field_name in fields):
        inside = [field_name for field_name in fields if field_name.startswith(f"{name}.")]
        raise NotFound(
            f"{name} is a section, not a field.",
            hint=f"Its fields: {', '.join(inside)}." if inside else "This environment has no settings of its own.",
        )
    ending = name.rsplit(".", 1)[-1]
    near = [field_name for field_name in fields if field_name.rsplit(".", 1)[-1] == ending]
    near += [
        field_name for field_name in difflib.get_close_matches(name, fields, n=3, cutoff=0.6) if field_name not in near
    ]
    if not near:
        ends = {field_name.rsplit(".", 1)[-1]: field_name for field_name in fields}
        near = [ends[end] for end in difflib.get_close_matches(ending, ends, n=3, cutoff=0.6)]
    hint = f"Did you mean {' or '.join(near[:3])}?" if near else "get_config lists the fields there are."
    raise NotFound(f"There is no field {short_json(name)}.", hint=hint)


def get_value(config: Config, field: Field) -> Any:
    """The value that the configuration has for a field; the default of a knob that was never set."""
    if field.name.startswith(f"{KNOBS}."):
        return config.environment.knobs.get(field.name.removeprefix(f"{KNOBS}."), field.default)
    return attrgetter(field.name)(config)
