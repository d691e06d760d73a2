"""Lookup of the owner's own trainers in the folders that settings.yaml lists under `trainers`: by `file.py:Class`, or
by the name under which a class registers its learning method (`method = "reinforce"` in its body).

Files are parsed and never run; the run itself checks the class in the trainer's process.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from toprope.errors import InvalidValue, NotFound, shown
from toprope.records.run.specification import TrainerSource
from toprope.sdk.authoring.definitions import fitting_definitions
from toprope.sdk.errors import LoadError
from toprope.settings.schema import Config
from toprope.settings.yamlfiles import nearest

_METHOD = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_FORM = re.compile(r"(?P<file>[^:\\]+\.py):(?P<attribute>[A-Za-z_]\w*)")


def trainer_of(config: Config, folders: Sequence[Path], settings_file: Path) -> TrainerSource | None:
    """Return the class that `algorithm.trainer` names; None if the algorithm is not `custom`.

    Args:
        folders: The owner's folders with trainers, in order.
        settings_file: Named in the message if there are no folders.

    Raises:
        InvalidValue: Not a valid name, a file outside the folder, or not valid Python.
        NotFound: There is no such file or class; the message lists the existing ones.
    """
    if config.algorithm.name != "custom":
        return None
    trainer = config.algorithm.trainer
    if _METHOD.fullmatch(trainer):
        trainer = _find_registered(trainer, folders) or trainer
    form = _FORM.fullmatch(trainer)
    if form is None or Path(form["file"]).is_absolute() or ".." in Path(form["file"]).parts:
        raise InvalidValue(
            f"algorithm.trainer is {shown(trainer)}, which is neither a 'file.py:Class' nor the name of a method "
            "in one of the owner's folders.",
            hint=_hint_of_known(folders, settings_file),
        )
    for folder in folders:
        file = folder / form["file"]
        if not file.is_file():
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            raise InvalidValue(f"{file} leads out of {folder}, the folder of trainers.")
        classes = _classes(file)
        if form["attribute"] not in classes:
            raise NotFound(f"{file} defines no class {form['attribute']}.", hint=nearest(form["attribute"], classes))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return TrainerSource(file=str(file.resolve()), attribute=form["attribute"], sha256=digest)
    raise NotFound(f"There is no trainer {shown(trainer)}.", hint=_hint_of_known(folders, settings_file))


def _classes(file: Path) -> list[str]:
    try:
        return fitting_definitions(file, [])
    except LoadError as error:
        raise InvalidValue(str(error), hint="Correct the file.") from None


def _find_registered(name: str, folders: Sequence[Path]) -> str | None:
    """Return the `file.py:Class` of the class that registers a method of this name, the first in the folders' order."""
    return _registered(folders).get(name)


def _registered(folders: Sequence[Path]) -> dict[str, str]:
    """Return the methods that classes register, each with the `file.py:Class` of the first that does."""
    methods: dict[str, str] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.py")):
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue
            for definition in tree.body:
                if isinstance(definition, ast.ClassDef):
                    for method in filter(None, map(_method, definition.body)):
                        methods.setdefault(method, f"{file.name}:{definition.name}")
    return methods


def _method(line: ast.stmt) -> str | None:
    """The name in a line `method = "name"` of a class."""
    if not isinstance(line, ast.Assign | ast.AnnAssign) or not isinstance(line.value, ast.Constant):
        return None
    target = line.targets[0] if isinstance(line, ast.Assign) else line.target
    return str(line.value.value) if isinstance(target, ast.Name) and target.id == "method" else None


def _hint_of_known(folders: Sequence[Path], settings_file: Path) -> str:
    if not folders:
        return f"The owner names folders with trainers in {settings_file}: trainers: [my-trainers]."
    trainers = [*_registered(folders)]
    for folder in folders:
        for file in sorted(folder.glob("*.py"))[:50]:
            try:
                trainers += [f"{file.name}:{name}" for name in _classes(file)]
            except InvalidValue:
                continue
    places = ", ".join(str(folder) for folder in folders)
    return f"In {places}: {', '.join(trainers[:20])}." if trainers else f"There is no trainer in {places}."
