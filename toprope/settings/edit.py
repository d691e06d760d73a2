"""Entering a variable into the owner's settings.yaml as a person would: comments, order and all else stay as they are.

A YAML library that loads and dumps would throw the owner's comments away. So the text is changed at the one place where
the value belongs, and the result is read back before it replaces the file: if it does not say exactly what was meant,
nothing is written. The file holds keys, so it is readable by its owner only.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from toprope.atomic import write_text
from toprope.errors import InvalidValue
from toprope.settings.yamlfiles import read_yaml

__all__ = ["set_variable"]

_STEP = "  "


def set_variable(path: Path, component: str, name: str, value: str) -> bool:
    """Sets variables.<component>.<name> in a settings file, which is made where there is none.

    Args:
        path: settings.yaml of the owner.
        component: Who gets it; `*` for every component.
        name: The variable's name.
        value: Its value. It is in no message.

    Returns:
        Whether anything changed.

    Raises:
        InvalidValue: The file is wrong, too unusual to be edited, or cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before = read_yaml(path) if path.exists() else {}
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}.") from None
    known = before.get("variables") or {}
    if not isinstance(known, dict) or not isinstance(known.get(component) or {}, dict):
        raise InvalidValue(f"{path}: variables must map components to names and values.", hint="Mend the file.")
    wanted = {**before, "variables": {**known, component: {**(known.get(component) or {}), name: value}}}
    if wanted == before:
        return False
    edited = _edited(text, component, name, value)
    try:
        sound = yaml.safe_load(edited) == wanted
    except yaml.YAMLError:
        sound = False
    if not sound:
        raise InvalidValue(
            f"{path} is written in a way that cannot be edited safely; it was left as it is.",
            hint=f"Add {name} below variables, {component!r} yourself.",
        )
    _replace(path, edited)
    return True


def _edited(text: str, component: str, name: str, value: str) -> str:
    """The text with the value in its place; what comes of an unusual text is checked by the caller."""
    quoted = json.dumps(value)  # a JSON text is a YAML scalar
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None or not isinstance(root, yaml.MappingNode):
        return _joined(text, f"variables:\n{_STEP}{_key(component)}:\n{_STEP * 2}{name}: {quoted}\n")
    variables = _value(root, "variables")
    if variables is None:
        return _added(text, root, "variables", {component: {name: value}})
    if not isinstance(variables, yaml.MappingNode):  # `variables:` with nothing behind it
        return _filled(text, variables, {component: {name: value}})
    members = _value(variables, component)
    if members is None:
        return _added(text, variables, component, {name: value})
    if not isinstance(members, yaml.MappingNode):
        return _filled(text, members, {name: value})
    old = _value(members, name)
    if old is None:
        return _added(text, members, name, value)
    return text[: old.start_mark.index] + quoted + text[old.end_mark.index :]


def _value(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for node, value in mapping.value if node.value == key), None)


def _added(text: str, mapping: yaml.MappingNode, key: str, value: object) -> str:
    """The text with one more entry, the first of its mapping."""
    start = mapping.start_mark.index
    if mapping.flow_style:
        entry = f"{_key(key)}: {json.dumps(value)}" + (", " if mapping.value else "")
        return text[: start + 1] + entry + text[start + 1 :]
    indent = " " * mapping.start_mark.column
    return text[:start] + f"{_key(key)}: {json.dumps(value)}\n{indent}" + text[start:]


def _filled(text: str, empty: yaml.Node, value: object) -> str:
    """The text with a value in place of an empty one (nothing, ~ or null)."""
    head, tail = text[: empty.start_mark.index], text[empty.end_mark.index :]
    return f"{head}{'' if head.endswith(' ') else ' '}{json.dumps(value)}{tail}"


def _joined(text: str, block: str) -> str:
    return (text if not text or text.endswith("\n") else text + "\n") + block


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else json.dumps(name)


def _replace(path: Path, text: str) -> None:
    target = path.resolve()  # an owner may keep settings elsewhere, behind a link
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(target, text)
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be written: {error.strerror or error}.", hint="Check the folder and the room on the disk."
        ) from None
