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
from typing import Any

import yaml

from toprope.errors import InvalidValue


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader; it refuses a key that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> Any:
    """Parse a text once; files are read at every call, because their present content counts."""
    # _UniqueKeys is a SafeLoader: no tags that create objects.
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        InvalidValue: It cannot be read, is not valid YAML, or is not a mapping with text keys.
    """
    try:
        data = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
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
            raise InvalidValue(f"{where}: there is no key {key!r}.", hint=nearest(str(key), allowed))
    return data
