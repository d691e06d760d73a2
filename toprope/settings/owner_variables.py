"""Set a variable in the owner's settings.yaml; comments, order and quotes in the file stay as they are.

The result is read back before it replaces the file: if it does not say exactly what was meant, nothing is written. The
file holds keys, so only its owner may read it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml

from toprope.atomic import write_text
from toprope.errors import InvalidValue
from toprope.settings.yamlfiles import read_yaml

__all__ = ["set_variable"]


def set_variable(path: Path, component: str, name: str, value: str) -> bool:
    """Set variables.<component>.<name> in a settings file; create the file if it is missing.

    Args:
        path: The owner's settings.yaml.
        component: The component that gets the variable; `*` for every component.
        name: The variable's name.
        value: Its value. No message contains it.

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
    try:
        edited = _with_value(text, ("variables", component, name), value)
        sound = yaml.safe_load(edited) == wanted
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


def _with_value(text: str, place: tuple[str, str, str], value: str) -> str:
    """The YAML text with a value at a place of three keys."""
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString
    from ruamel.yaml.util import load_yaml_guess_indent

    editor = YAML()
    editor.preserve_quotes, editor.width = True, 1 << 20
    data, indent, _ = load_yaml_guess_indent(text, yaml=editor)
    editor.indent = indent or 2
    root = data if data is not None else {}
    mapping: Any = root
    for key in place[:-1]:
        if mapping.get(key) is None:
            mapping[key] = {}
        mapping = mapping[key]
    mapping[place[-1]] = DoubleQuotedScalarString(value)
    out = io.StringIO()
    editor.dump(root, out)
    # A file without entries holds comments at most, which the library does not keep.
    return out.getvalue() if data is not None or not text.strip() else f"{text.rstrip()}\n{out.getvalue()}"
