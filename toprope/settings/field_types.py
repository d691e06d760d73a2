"""Types of configuration values: strict, and able to read the text that an agent sends for a value.

Agents often send JSON values as text ("1e-5", "true", "null"). A value that fits its type passes as it is; a text is
read as the type says; everything else is refused by pydantic.
"""

from __future__ import annotations

import functools
import json
import keyword
import math
import re
import types
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AllowInfNan, BeforeValidator, Strict, TypeAdapter
from pydantic_core import PydanticCustomError

from toprope.text_format import short_json

_CARD_TYPES: dict[str, Any] = {
    "bool": bool, "boolean": bool, "int": int, "integer": int, "float": float, "number": float,
    "str": str, "string": str, "text": str, "list": list[Any], "tuple": list[Any], "array": list[Any],
    "dict": dict[str, Any], "object": dict[str, Any],
}  # fmt: skip
_OF_PROMPTS = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "loop", "range", "dict", "lipsum", "cycler", "joiner", "namespace",
)  # fmt: skip
"""Names in chat templates that every prompt or Jinja sets; tokens such as bos_token are the tokenizer's."""
_MOST_VARIABLES, _MOST_VARIABLES_TEXT = 32, 4096
_LARGEST_EXACT = 2**53
"""Larger floats cannot tell neighbouring whole numbers apart."""


def reader(
    annotation: Any, *, nullable: bool = False, choices: tuple[Any, ...] | None = None, metadata: tuple[Any, ...] = ()
) -> TypeAdapter[Any]:
    """An adapter that reads and checks one value.

    Args:
        annotation: A scalar type, a list or dict of one or of a Literal, or Any.
        nullable: Whether null is a value.
        choices: The only values; text is compared without regard to case.
        metadata: Constraints and validators, as in `Annotated`.
    """
    if choices is not None:
        annotated: Any = Annotated[Any, BeforeValidator(functools.partial(_choose, choices))]
    elif annotation in _READABLE:
        annotated = _READABLE[annotation]
    else:
        *key, item = get_args(annotation)
        parts = (*key, item if item is Any or get_origin(item) is Literal else _READABLE[item])
        annotated = Annotated[get_origin(annotation)[parts], BeforeValidator(_json)]
    if metadata:
        annotated = Annotated[annotated, *metadata]
    return TypeAdapter(Annotated[annotated | None, BeforeValidator(_null)] if nullable else annotated)


def template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Check variables of a chat template: their names, that they are JSON scalars, and their size."""
    if len(variables) > _MOST_VARIABLES or len(json.dumps(variables, default=str)) > _MOST_VARIABLES_TEXT:
        raise ValueError(f"at most {_MOST_VARIABLES} variables of together {_MOST_VARIABLES_TEXT} characters are taken")
    for name, value in variables.items():
        word = keyword.iskeyword(name) or keyword.iskeyword(name.capitalize())
        if word or not (name.isascii() and name.isidentifier()) or name in _OF_PROMPTS or name.endswith("_token"):
            raise ValueError(f"{short_json(name)} is not a variable that a chat template may be given")
        scalar = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        if not scalar or str(value) in ("true", "false"):
            raise ValueError(f"{name} must be true or false without quotes, a number, a text or null")
        if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            raise ValueError(f"{name} holds half of a character (a surrogate), which no text may")
    return variables


def card_type(text: str) -> tuple[Any, bool]:
    """The type that a card names (`int | null`, `list[str]`), and whether null is among its values.

    "int | float" is a number; any other union, and an unknown word, is for the environment to judge.
    """
    words = [word.strip() for word in text.lower().split("|")]
    kinds = [_CARD_TYPES.get(word.split("[")[0], Any) for word in words if word not in ("null", "none", "nonetype")]
    if len(kinds) == 1 and kinds[0] == list[Any]:
        item = _CARD_TYPES.get(text.lower().strip().removesuffix("]").partition("[")[2], Any)
        if item in _READABLE:
            kinds = [types.GenericAlias(list, (item,))]
    single = kinds[0] if len(kinds) == 1 else float if {*kinds} == {int, float} else Any
    return single, len(kinds) < len(words)


def _null(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("null", "none") else value


def _boolean(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.strip().lower(), value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    # Python reads "1_000" and "１" as numbers; a configuration should not.
    if isinstance(value, str) and value.isascii() and "_" not in value:
        for parse in (int, float):
            with suppress(ValueError):
                return parse(value)
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    exact = isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT
    return int(value) if exact else value


def _json(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _json_value(value: Any) -> Any:
    """Any JSON value, or text; the environment itself judges it when it is opened."""
    parsed = _json(value)
    try:
        if value is None:
            raise ValueError
        json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError):
        if isinstance(value, str):  # such as "NaN"
            return value
        raise PydanticCustomError("not_json", "not a JSON value") from None
    return parsed


def _choose(choices: tuple[Any, ...], value: Any) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    if not isinstance(value, bool | list | dict | None):
        text = str(value).strip().lower()
        for choice in choices:
            if text == str(choice).lower():
                return choice
    raise PydanticCustomError("not_a_choice", "not a choice")


_READABLE: dict[Any, Any] = {
    bool: Annotated[bool, Strict(), BeforeValidator(_boolean)],
    int: Annotated[int, Strict(), BeforeValidator(_whole)],
    float: Annotated[float, Strict(), AllowInfNan(False), BeforeValidator(_number)],
    str: Annotated[str, Strict()],
    Any: Annotated[Any, BeforeValidator(_json_value)],
}
"""Strict types that also read the text which an agent may send for their values."""
