"""The owner's YAML files that configure an adapter.

    # environments/sums.yaml in the owner's configuration folder
    adapter: trl
    file: rewards.py            # beside this file, like a file of rows
    reward_funcs: [accuracy, brief]
    ranges: {brief: [-1, 0]}
    rows: train.jsonl

The keys are `adapter`, `interpreter`, and those of the adapter's target (its `KEYS`). Nothing is executed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import NAME, first_line, parse
from toprope.settings.yamlfiles import check_keys, read_yaml
from toprope.workbench.adapters import Adapter
from toprope.workbench.entries import Entry, Names, broken
from toprope.workbench.interpreters.known import Known
from toprope.workbench.sources.listing import entry_of, home_of, install_command

_TARGETED = ("trl", "score", "nemo_gym", "reasoning_gym", "gymnasium")
_OURS = ("adapter", "interpreter")
_PATHS = ("file", "rows")


def declared_adapter(file: Path) -> str | None:
    """Return the adapter that a YAML file names if it can be configured by such a file."""
    try:
        named = read_yaml(file).get("adapter")
    except InvalidValue:
        return None
    return named if named in _TARGETED else None


class TargetSource:
    """See the module.

    Args:
        places: The owner's folders with environments.
        adapters: Returns every adapter.
        interpreters: Returns every known interpreter.
    """

    kind = "folder"

    def __init__(
        self,
        places: Sequence[Path],
        adapters: Callable[[], Sequence[Adapter]],
        interpreters: Callable[[], Sequence[Known]],
    ) -> None:
        self._places, self._adapters, self._interpreters = places, adapters, interpreters

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by folder and file name; invalid files become entries with the reason."""
        return [
            self._entry(file, named, names)
            for place in self._places
            for file in sorted([*place.glob("*.yaml"), *place.glob("*.yml")])
            if file.is_file() and not file.name.startswith("_") and (named := declared_adapter(file)) is not None
        ]

    def _entry(self, file: Path, named: str, names: Names) -> Entry:
        adapter = next(one for one in self._adapters() if one.name == named)
        keys = tuple(getattr(adapter.module, "KEYS", ()))
        try:
            if adapter.problem:
                raise InvalidValue(adapter.problem, hint="")
            if NAME.fullmatch(file.stem) is None:
                raise InvalidValue(
                    f"{file.stem!r} is not a valid environment name.",
                    hint="Use lower-case letters, digits, '_' and '-': rename the file.",
                )
            given = check_keys(read_yaml(file), [*_OURS, *keys], str(file))
            if holder := names.claim(file.stem, str(file)):
                raise InvalidValue(f"The name {file.stem!r} is taken by {holder}.", hint=f"Rename {file}.")
        except InvalidValue as problem:
            return broken(file.stem, str(problem), self.kind)
        python = given.pop("interpreter", None)
        listed = self._listed(file, adapter, given)
        if python is None and adapter.package:
            known = home_of(adapter, self._interpreters())
            python = known.python if known is not None else None
            if known is None:
                needs = f"The owner installs it: {install_command(named)}"
                listed = Listed(listed.name, listed.target, listed.description, problem=needs, needs="install")
        return entry_of(listed, file.stem, self.kind, adapter, python if python is None else str(python))

    def _listed(self, file: Path, adapter: Adapter, given: dict[str, Any]) -> Listed:
        target = {key: value for key, value in given.items() if key != "adapter"}
        for key in _PATHS:
            beside = file.parent / Path(str(target.get(key) or "")).expanduser()
            if isinstance(target.get(key), str) and beside.is_file():
                target[key] = str(beside)
        target.setdefault("name", file.stem)
        said = (
            target.get("description")
            or _documented(target.get("file"))
            or f"{file.stem}, by the adapter {adapter.name}"
        )
        several = bool(target.get("environment") or target.get("tools") or adapter.name in ("nemo_gym", "gymnasium"))
        return Listed(
            name=file.stem,
            target=json.dumps(target, default=str, sort_keys=True),
            description=str(said),
            turns=None if several else 1,
            tools=several,
            tags=(adapter.name,),
        )


def _documented(file: Any) -> str:
    """Return the first line of a file's docstring; empty if it cannot be read."""
    try:
        return first_line(ast.get_docstring(parse(Path(str(file)))))
    except (OSError, SyntaxError, ValueError):
        return ""
