"""Read the owner's YAML files strictly: errors name the file, the key and the nearest valid key.

A misspelt key in the file of locks would otherwise be a lock that does not hold.
"""

from __future__ import annotations

import copy
import difflib
import functools
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from toprope.atomic import write_text
from toprope.errors import InvalidValue, shown

Model = TypeVar("Model", bound=BaseModel)
YAML_ENDINGS = (".yaml", ".yml")
"""Endings of the owner's files."""


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, with two differences in keys.

    A key that is given twice is refused; YAML would silently keep the last. Keys such as `on` and `no` stay texts; YAML
    1.1 would read truth values.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:bool":
                key_node.tag = "tag:yaml.org,2002:str"
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


@functools.lru_cache(maxsize=32)
def _parse(text: str) -> Any:
    """Parse a text once; files are read at every call, because their present content counts."""
    # _UniqueKeys is a SafeLoader: no tags that create objects.
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        InvalidValue: It cannot be read, is not valid YAML, or is not a mapping with text keys.
    """
    try:
        data = copy.deepcopy(_parse(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}.", hint="Fix the file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise InvalidValue(f"{path} is not valid YAML{where}: {problem}.", hint="Fix the file.") from None
    except RecursionError:
        raise InvalidValue(f"{path} is nested too deeply.", hint="Fix the file.") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InvalidValue(f"{path} must hold a mapping of names to values.", hint="Fix the file.")
    return data


def edited_yaml(text: str, place: Sequence[str], value: Any) -> str:
    """The YAML text with a value at a place, or without it if the value is None. Comments, order and quotes stay.

    Args:
        place: Keys from the root; mappings on the way are created if they are missing.

    Raises:
        Exception: Any of the library's, for an unusual file. The caller reads the result back before it is used.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString
    from ruamel.yaml.util import load_yaml_guess_indent

    editor = YAML()
    editor.preserve_quotes, editor.width = True, 1 << 20
    data, indent, dash = load_yaml_guess_indent(text, yaml=editor)
    # If the file has a list, `indent` is that of its items.
    editor.indent(mapping=dash or indent or 2, sequence=(dash or 0) + 2, offset=dash or 0)
    root = data if data is not None else {}
    mapping: Any = root
    for key in place[:-1]:
        if mapping.get(key) is None:
            mapping[key] = {}
        mapping = mapping[key]
    if value is None:
        mapping.pop(place[-1], None)
    else:
        mapping[place[-1]] = DoubleQuotedScalarString(value) if isinstance(value, str) else value
    out = io.StringIO()
    editor.dump(root, out)
    # A file without entries holds comments at most, which the library does not keep.
    return out.getvalue() if data is not None or not text.strip() else f"{text.rstrip()}\n{out.getvalue()}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence with the nearest name ("Did you mean x?"), or with all of them."""
    names = list(names)
    near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(names) or 'none'}."


def check_keys(data: Any, allowed: Iterable[str], where: str) -> dict[str, Any]:
    """Return `data` if it is a mapping whose keys are all allowed.

    Raises:
        InvalidValue: It is not; the message names the nearest key.
    """
    allowed = list(allowed)
    if not isinstance(data, dict):
        raise InvalidValue(f"{where} must be a mapping with {', '.join(allowed)}.", hint="Fix the file.")
    for key in data:
        if key not in allowed:
            raise InvalidValue(f"{where}: there is no key {shown(key)}.", hint=nearest(str(key), allowed))
    return data


def read_fields(model: type[Model], data: Any, where: str) -> Model:
    """Return `data` as a model.

    Raises:
        InvalidValue: It does not fit; the message names the fields and no value, a secret perhaps. The hint has the
            names nearest to unknown fields.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems, hints = [], []
        for problem in error.errors(include_input=False):
            fields = _fields_at(model, problem["loc"][:-1]) if problem["type"] == "extra_forbidden" else ()
            text = "there is no such key" if fields else _said(problem)
            problems.append(": ".join(filter(None, (".".join(map(str, problem["loc"])), text))))
            hints.append(nearest(str(problem["loc"][-1]), fields) if fields else "Fix the file.")
        raise InvalidValue(f"{where}: {'; '.join(problems)}.", hint=" ".join(dict.fromkeys(hints))) from None


def _said(problem: ErrorDetails) -> str:
    """The words for a wrong value; pydantic's speak of Python's types, which an owner of a YAML file need not know."""
    of_yaml = {"tuple_type": "must be a list", "model_type": "must be a mapping of names to values"}
    return of_yaml.get(problem["type"], problem["msg"].removeprefix("Value error, "))


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> Iterable[str]:
    """The fields of the model at a place within another; empty if it is not clear which one that is."""
    within: type[BaseModel] | None = model
    for step in place:
        if within is not None and step in within.model_fields:
            within = _model_in(within.model_fields[str(step)].annotation)
        # Other steps are keys of a mapping or numbers in a list of that model.
    return within.model_fields if within is not None else ()


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def set_variable(path: Path, component: str, name: str, value: str) -> bool:
    """Set variables.<component>.<name> in a settings file; create the file if it is missing.

    Comments, order and quotes in the file stay as they are. The result is read back before it replaces the file: if it
    does not say exactly what was meant, nothing is written. The file holds keys, so only its owner may read it.

    Args:
        path: The owner's settings.yaml.
        component: The component that gets the variable; `*` for every component.
        name: The variable's name.
        value: Its value. No message contains it.

    Returns:
        True if the file changed.

    Raises:
        InvalidValue: The file is wrong, too unusual to be edited, or cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before = read_yaml(path) if path.exists() else {}
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}.") from None
    variables = before.get("variables") or {}
    if not isinstance(variables, dict) or not isinstance(variables.get(component) or {}, dict):
        raise InvalidValue(f"{path}: variables must map components to names and values.", hint="Fix the file.")
    wanted = {**before, "variables": {**variables, component: {**(variables.get(component) or {}), name: value}}}
    if wanted == before:
        return False
    try:
        edited = edited_yaml(text, ("variables", component, name), value)
        sound = _parse(edited) == wanted
    except Exception:  # whatever the library makes of an unusual file
        sound = False
    if not sound:
        raise InvalidValue(
            f"{path} is written in a way that cannot be edited safely; it was left as it is.",
            hint=f"Add {name} below variables, {component!r} yourself.",
        )
    target = path.resolve()  # an owner may keep settings elsewhere, behind a link
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(target, edited)
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be written: {error.strerror or error}.", hint="Check the folder and the room on the disk."
        ) from None
    return True
