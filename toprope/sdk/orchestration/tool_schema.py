"""Name, description and JSON schema of a Python function that a policy can call.

They come from type hints and a Google-style docstring, as in `get_json_schema` of transformers, so that a function has
the same schema there. Nothing is required: a parameter without a hint takes any value.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import InvalidRequest

__all__ = ["Signature", "signature_of"]

_BASIC: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
                          list: "array", tuple: "array", dict: "object"}  # fmt: skip
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Signature(typing.NamedTuple):
    """A function in the form that a policy sees."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object."""
    takes_any: bool
    """True if it accepts further named arguments (`**kwargs`)."""

    def check(self, arguments: Any) -> dict[str, Any]:
        """Validate the arguments of a call and convert them where that is safe.

        Raises:
            InvalidRequest: A name is unknown or missing, or a value has another type.
        """
        properties: dict[str, Any] = self.parameters["properties"]
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(f"arguments must be a JSON object with {', '.join(properties) or 'no names'}.")
        for name in arguments:
            if name not in properties and not self.takes_any:
                raise InvalidRequest(
                    f"{self.name} has no argument {name!r}. {nearest(str(name), properties, 'Arguments')}"
                )
        if missing := [name for name in self.parameters.get("required", ()) if name not in arguments]:
            raise InvalidRequest(f"{self.name} needs the argument {missing[0]!r}.")
        return {name: _convert(self.name, name, value, properties.get(name, {})) for name, value in arguments.items()}


def signature_of(function: Callable[..., Any], name: str = "") -> Signature:
    """The signature of a function or a bound method."""
    text = inspect.getdoc(function) or ""
    descriptions = _arguments(text)
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required, takes_any = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        properties[parameter.name] = _schema(hints.get(parameter.name, Any))
        if description := descriptions.get(parameter.name):
            properties[parameter.name]["description"] = description
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    head = " ".join(_SECTION.split(text, maxsplit=1)[0].split())
    return Signature(name or getattr(function, "__name__", "tool"), head or "No description.", schema, takes_any)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # a hint may name something that exists for type checkers only
        return {}


def _arguments(text: str) -> dict[str, str]:
    """Descriptions of arguments in a docstring, by name."""
    descriptions: dict[str, str] = {}
    inside, indent, name = False, None, ""
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section:
            inside = section[1] in ("Args", "Arguments", "Parameters")
            indent, name = None, ""
            continue
        if not inside or not line.strip():
            continue
        match = _ARGUMENT.match(line)
        if match and (indent is None or len(match[1]) <= indent):
            indent, name = len(match[1]), match[2]
            descriptions[name] = match[3].strip()
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def _schema(hint: Any) -> dict[str, Any]:
    """JSON schema of a type; an empty schema for types without a counterpart in JSON."""
    if hint in _BASIC:
        return {"type": _BASIC[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _schema(inner[0])
    if origin is typing.Literal:
        return {"enum": list(inner)} | _same_type(inner)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        return {"enum": values} | _same_type(values)
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema(member_hint) for member_hint in inner if member_hint is not type(None)]
        schema = dict(kinds[0]) if len(kinds) == 1 else {"anyOf": kinds}
        return schema | ({"nullable": True} if type(None) in inner else {})
    if origin in (list, set, frozenset, tuple) or origin is not None and issubclass(origin, typing.Sequence):
        schema = {"type": "array"}
        item_hints = [item_hint for item_hint in inner if item_hint is not Ellipsis]
        if item_hints and (origin is not tuple or len(inner) == 2 and inner[1] is Ellipsis):
            return schema | {"items": _schema(item_hints[0])}
        return schema | ({"prefixItems": [_schema(item_hint) for item_hint in item_hints]} if item_hints else {})
    if origin is dict or origin is not None and issubclass(origin, typing.Mapping):
        return {"type": "object"} | ({"additionalProperties": _schema(inner[1])} if len(inner) == 2 else {})
    return {}


def _same_type(values: typing.Iterable[Any]) -> dict[str, Any]:
    kinds = {_BASIC.get(type(value)) for value in values}
    return {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}


def _convert(function: str, name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """The value in the schema's type; converts numbers written as strings, which small models often do."""
    kind = schema.get("type")
    if (value is None and schema.get("nullable")) or not isinstance(kind, str):
        pass
    elif kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    elif kind in ("integer", "number") and isinstance(value, str):
        try:
            value = int(value) if kind == "integer" else float(value)
        except ValueError:
            raise InvalidRequest(f"argument {name!r} of {function} must be a {kind}, not {value[:40]!r}.") from None
    elif not _is(kind, value):
        raise InvalidRequest(f"argument {name!r} of {function} must be of type {kind}, not {type(value).__name__}.")
    if "enum" in schema and value not in schema["enum"] and not (value is None and schema.get("nullable")):
        raise InvalidRequest(f"argument {name!r} of {function} must be one of {schema['enum']}, not {value!r:.40}.")
    return value


def _is(kind: str, value: Any) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    expected = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, expected.get(kind, object))
