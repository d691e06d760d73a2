"""The owner's YAML files that configure an adapter.

    # environments/sums.yaml in the owner's configuration folder
    adapter: trl
    file: rewards.py            # beside this file, like a file of rows
    reward_funcs: [accuracy, brief]
    ranges: {brief: [-1, 0]}
    rows: train.jsonl
    knobs: {turns: 4}           # these take the place of the environment's defaults

The other keys are `description`, `interpreter`, and those of the adapter's target (its `KEYS`). An adapter without KEYS
has the key `target`: what its `make` takes, as a text or as an object. Nothing is executed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.discovery import NAME, first_line, parse
from toprope.settings.yamlfiles import check_keys, read_yaml
from toprope.workbench.adapters import Adapter
from toprope.workbench.entries import Entry, Names, broken
from toprope.workbench.interpreters.known import Known
from toprope.workbench.sources.listing import entry_of, home_of, install_command

_DATASET = "dataset"
"""It has a source of its own, which also reports files without an adapter."""
_OURS = ("adapter", "interpreter", "knobs")
_PATHS = ("file", "rows", "folder", "packages")
_ROWS = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of files with rows."""
_SINGLE_TURN = ("trl", "score", "reasoning_gym")
"""Adapters whose environments have one turn unless the target has an environment or tools."""


def yaml_in(place: Path) -> list[Path]:
    """Return the YAML files directly in a folder that may declare environments; a file stands for itself.

    Those in the folders below are often of other authors, and could open any path to their environment.
    """
    files = [place] if place.is_file() else sorted([*place.glob("*.yaml"), *place.glob("*.yml")])
    return [file for file in files if file.is_file() and (file == place or not file.name.startswith("_"))]


def defining_files(folder: Path) -> list[Path]:
    """Return the YAML files of a folder that name an adapter, and so define environments."""
    defining = []
    for file in yaml_in(folder):
        with contextlib.suppress(InvalidValue):
            if isinstance(read_yaml(file).get("adapter"), str):
                defining.append(file)
    return defining


def files_of_targets(folder: Path) -> set[Path]:
    """Return the files that the YAML files of a folder name: their environments are those of the YAML files."""
    named = (read_yaml(file).get("file") for file in defining_files(folder))
    return {folder / name for name in named if isinstance(name, str)}


def declared_adapter(file: Path) -> str | None:
    """Return the adapter that a YAML file names; None if it is a data set, names none or cannot be read."""
    try:
        adapter_name = read_yaml(file).get("adapter")
    except InvalidValue:
        return None
    return adapter_name if isinstance(adapter_name, str) and adapter_name != _DATASET else None


class TargetSource:
    """Lists the environments that YAML files define.

    Args:
        places: The owner's folders with environments, or YAML files.
        name: Of the environment of a file; by default that of the file.
        python: Interpreter, if the file names none; None for that of the ecosystem.
    """

    kind = "folder"

    def __init__(
        self,
        places: Sequence[Path],
        adapters: Callable[[], Sequence[Adapter]],
        interpreters: Callable[[], Sequence[Known]],
        name: str = "",
        python: str | None = None,
    ) -> None:
        self._places, self._adapters, self._interpreters = places, adapters, interpreters
        self._name, self._python = name, python

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by folder and file name; invalid files become entries with the reason."""
        by_name = {adapter.name: adapter for adapter in self._adapters()}
        return [
            self._entry(file, self._name or file.stem, by_name, adapter_name, names)
            for place in self._places
            for file in yaml_in(place)
            if (adapter_name := declared_adapter(file)) is not None
        ]

    def _entry(self, file: Path, name: str, by_name: dict[str, Adapter], adapter_name: str, names: Names) -> Entry:
        try:
            if adapter_name not in by_name:
                raise InvalidValue(
                    f"{file} names an unknown adapter.", hint=nearest(adapter_name, sorted(by_name), "Adapters")
                )
            adapter = by_name[adapter_name]
            if adapter.problem:
                raise InvalidValue(adapter.problem, hint="")
            if NAME.fullmatch(name) is None:
                raise InvalidValue(
                    f"{name!r} is not a valid environment name.",
                    hint="Use lower-case letters, digits, '_' and '-': rename the file.",
                )
            keys = tuple(getattr(adapter.module, "KEYS", ()))
            options = check_keys(read_yaml(file), [*_OURS, *(keys or ("description", "target"))], str(file))
            knobs = options.pop("knobs", None) or {}
            if not isinstance(knobs, dict):
                raise InvalidValue(f"{file}: knobs must be an object of settings.", hint="Such as: knobs: {turns: 4}")
            if not keys and not options.get("target"):
                example = "a URL, /path/file.py:Name, an id of the ecosystem, or an object"
                raise InvalidValue(f"{file}: target is missing.", hint=f"The adapter {adapter_name} takes {example}.")
            if taken := names.objection(name, str(file), f"Rename {file}."):
                raise InvalidValue(taken)
        except InvalidValue as problem:
            return broken(name, str(problem), self.kind)
        python = options.pop("interpreter", None) or self._python
        listed = (
            self._list_by_keys(file, name, adapter, options) if keys else _list_by_target(file, name, adapter, options)
        )
        if python is None and adapter.package and not (adapter.urls_alone and options.get("url")):
            home = home_of(adapter, self._interpreters())
            python = home.python if home is not None else None
            if home is None:
                needs = f"The owner installs it: {install_command(adapter_name)}"
                listed = Listed(listed.name, listed.target, listed.description, problem=needs, needs="install")
        entry = entry_of(listed, name, self.kind, adapter, python if python is None else str(python))
        return replace(entry, environment=entry.environment.model_copy(update={"knobs": knobs}))

    def _list_by_keys(self, file: Path, name: str, adapter: Adapter, options: dict[str, Any]) -> Listed:
        target = {key: value for key, value in options.items() if key != "adapter"}
        for key in target.keys() & _PATHS:
            target[key] = _resolve_paths(file, key, target[key])
        target.setdefault("name", name)
        description = (
            target.get("description") or _docstring_line(target.get("file")) or f"{name}, by the adapter {adapter.name}"
        )
        several = bool(target.get("environment") or target.get("tools") or adapter.name not in _SINGLE_TURN)
        return Listed(
            name=name,
            target=json.dumps(target, default=str, sort_keys=True),
            description=str(description),
            turns=None if several else 1,
            tools=several,
            tags=(adapter.name,),
        )


def _resolve_paths(file: Path, key: str, value: Any) -> Any:
    """Return a path relative to a file, or a list of them, as absolute ones; other values as they are."""
    if isinstance(value, list):  # rows may be texts
        paths = key == "packages"
        return [_resolve_path(file, item) if paths or Path(str(item)).suffix in _ROWS else item for item in value]
    return _resolve_path(file, value)


def _resolve_path(file: Path, value: Any) -> Any:
    try:
        path = file.parent / Path(str(value or "")).expanduser()
        return str(path) if isinstance(value, str) and path.exists() else value
    except (OSError, RuntimeError, ValueError):  # a long text, a home of nobody
        return value


def _list_by_target(file: Path, name: str, adapter: Adapter, options: dict[str, Any]) -> Listed:
    """Return the listing of an adapter that takes a text; a path in it is relative to the YAML file."""
    target = options["target"]
    if isinstance(target, dict):
        path = file.parent / Path(str(target.get("folder") or "")).expanduser()
        text = json.dumps({**target, "folder": str(path)} if "folder" in target else target, sort_keys=True)
    else:
        parted = re.fullmatch(r"(.+\.py)([:@].*)", str(target))
        place, suffix = parted.groups() if parted is not None else (str(target), "")
        path = file.parent / Path(place).expanduser()
        text = f"{path}{suffix}" if path.exists() else str(target)
    description = options.get("description") or f"{name}, by the adapter {adapter.name}"
    return Listed(name=name, target=text, description=str(description), turns=None, tags=(adapter.name,))


def _docstring_line(file: Any) -> str:
    """Return the first line of a file's docstring; empty if it cannot be read."""
    try:
        return first_line(ast.get_docstring(parse(Path(str(file)))))
    except (OSError, SyntaxError, ValueError):
        return ""
