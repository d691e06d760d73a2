"""The formats of clients' files: read one entry, set it, remove it. Comments, order and everything else stay."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.settings.yamlfiles import edited_yaml
from toprope_server.cli.clients import jsonc


@dataclass(frozen=True)
class Format:
    """Functions that read and edit a file. All raise ValueError for a text that they cannot read.

    Attributes:
        name: For messages.
        loads: The value of a text.
        edited: The text with a value at a path of keys, or without it if the value is None.
    """

    name: str
    loads: Callable[[str], Any]
    edited: Callable[[str, Sequence[str], Any], str]


def _edited_json(text: str, path: Sequence[str], value: Any) -> str:
    return jsonc.remove_member(text, path) if value is None else jsonc.set_member(text, path, value)


def _edited_toml(text: str, path: Sequence[str], value: Any) -> str:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        place: Any = document
        for key in path[:-1]:
            if key not in place:
                place[key] = tomlkit.table(is_super_table=True)
            place = place[key]
        if value is None:
            place.pop(path[-1], None)
        else:
            place[path[-1]] = value
        return tomlkit.dumps(document)
    except (TOMLKitError, AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None


def _edited_yaml(text: str, path: Sequence[str], value: Any) -> str:
    try:
        return edited_yaml(text, path, value)
    except Exception as error:  # whatever the library makes of an unusual file
        raise ValueError(str(error)) from None


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def _shallow(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a reader refuse a text whose depth exceeds its stack, like any other text that it cannot read."""

    def loads(text: str) -> Any:
        try:
            return load(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    return loads


JSON = Format("JSON", _shallow(lambda text: json.loads(text) if text.strip() else {}), _edited_json)
JSONC = Format("JSON with comments", _shallow(jsonc.loads), _edited_json)
TOML = Format("TOML", _shallow(tomllib.loads), _edited_toml)
YAML_FORMAT = Format("YAML", _shallow(_load_yaml), _edited_yaml)
