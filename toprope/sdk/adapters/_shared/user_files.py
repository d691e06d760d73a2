"""Users' files for adapters: definitions and rows.

The targets of the adapters `trl` and `score` share these keys:

    {"file": "/path/rewards.py", "rows": "train.jsonl", "range": [0, 1], "clip": false, "name": ..., "description": ...}

`rows` is a file (JSON lines, CSV, Parquet; relative to the user's file), `hf:<id>` of the Hugging Face Hub, or the name
of a list, a data set or a parameterless function in the user's file.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from toprope.sdk.adapters._servers.openenv_serve import work_in_links
from toprope.sdk.adapters._shared import rows as _rows
from toprope.sdk.adapters._shared.random_state import OwnRandom, load_numpy
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.authoring.loading import module_of
from toprope.sdk.discovery import assignments
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.wall.paths import package_of
from toprope.sdk.wall.projects import is_broad, roots_above

__all__ = ["UserFile", "data_beside", "functions", "parsed", "prepare", "public_name", "within_package"]

ROWS = ("rows", "train_dataset", "dataset", "train_rows", "ROWS", "DATASET")
"""Default names of rows in a file."""
_OF_ROOTS = (".git", "pyproject.toml")


def parsed(target: str, adapter: str, keys: Iterable[str]) -> dict[str, Any]:
    """Parse the target of an adapter.

    Raises:
        LoadError: Not a JSON object, or a key is unknown.
    """
    try:
        settings = json.loads(target)
    except ValueError as error:
        raise LoadError(f"The target of {adapter} is a JSON object, not {target[:80]!r} ({error}).") from None
    if not isinstance(settings, dict):
        raise LoadError(f"The target of {adapter} is a JSON object, not {type(settings).__name__}.")
    known = list(keys)
    for key in settings:
        if key not in known:
            raise LoadError(f"The target of {adapter} has no {key!r}. {nearest(key, known, 'Keys')}")
    return settings


class UserFile:
    """A loaded file of a user.

    Args:
        path: The file.
        module: What it defines, if it was run already.

    Raises:
        LoadError: The file does not load.
    """

    def __init__(self, path: str, module: ModuleType | None = None) -> None:
        if not path:
            raise LoadError("The target needs `file`, the path of a Python file.")
        self.path = Path(path).expanduser().absolute()
        self._luck = OwnRandom(0)  # every worker has the same rows
        if module is None:
            prepare(self.path)
            with self._luck:
                module = module_of(self.path)
        self.module: ModuleType = module

    def get(self, name: str, what: str) -> Any:
        """Return a definition of the file by name, dotted for attributes: `rewards.accuracy`.

        Raises:
            LoadError: The name is not defined.
        """
        value: Any = self.module
        for part in name.split("."):
            if not hasattr(value, part):
                public = [word for word in vars(self.module) if not word.startswith("_")]
                raise LoadError(
                    f"{self.path.name} has no {name!r} for {what}. {nearest(name, public, 'It defines')}",
                    f"{self.path}:1",
                )
            value = getattr(value, part)
        return value

    def callable(self, name: str, what: str) -> Callable[..., Any]:
        """Return a function, class or other object of the file that can be called.

        Raises:
            LoadError: The name is not defined, or something else.
        """
        value = self.get(name, what)
        if not callable(value):
            raise LoadError(f"{self.path.name}: {name} is {type(value).__name__}, not {what} that can be called.")
        function: Callable[..., Any] = value
        return function

    def files(self, rows: Any) -> tuple[str, ...]:
        """The file itself, and the file of its rows."""
        data_file = self._data(rows)
        return (str(self.path),) if data_file is None else (str(self.path), str(data_file))

    def own_rows(self) -> str:
        """See `data_beside`; empty for a compiled module."""
        try:
            return data_beside(self.path, ast.parse(self.path.read_bytes()))
        except (OSError, SyntaxError, ValueError):
            return ""

    def rows(self, source: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows that a target names.

        Raises:
            InvalidRequest: The rows cannot be read.
            LoadError: The name is not defined.
            EnvironmentMistake: A row is not an object.
        """
        rows: Any = source
        luck = self._luck.continued()  # the file may set seeds where it is loaded
        if (place := self._data(source)) is not None:
            rows = _rows.rows_of(str(place), [self.path.parent], [place])
        elif isinstance(source, str) and source.startswith(_rows.HUB):
            rows = _rows.rows_of(source, [self.path.parent])
        elif isinstance(source, str):
            rows = self.get(source, "the rows")
            if callable(rows) and not isinstance(rows, Sequence):
                with luck:
                    rows = rows()
        if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable) and not hasattr(rows, "__getitem__"):
            raise EnvironmentMistake(f"The rows {str(source)[:60]!r} are {type(rows).__name__}, not a list of rows.")
        for number, row in enumerate(_drawn(rows, luck) if isinstance(rows, Generator) else rows, 1):
            if isinstance(row, str):
                row = {"prompt": row}
            if not isinstance(row, Mapping):
                raise EnvironmentMistake(f"Row {number} is {type(row).__name__}, not an object with columns.")
            yield dict(row)

    def _data(self, source: Any) -> Path | None:
        if not isinstance(source, str) or _rows.kind_of(Path(source)) not in _rows.KINDS:
            return None
        place = Path(source).expanduser()
        return place if place.is_absolute() else self.path.parent / place


def prepare(file: Path) -> None:
    """Prepare this process for a user's file.

    A worker behind a wall starts in its scratch folder, or in another empty one for checks; it changes to links to what
    lies beside the file, whose relative paths are of there, or of the root of its repository. An empty folder without a
    wall may be the owner's own. NumPy is imported before the file, see `load_numpy`.
    """
    with contextlib.suppress(OSError):  # a HOME, which nobody can list behind a wall
        is_for_checks = os.environ.get("TOPROPE_WALLED") and not os.listdir()
        if is_for_checks or os.path.samefile(os.curdir, tempfile.gettempdir()):
            work_in_links(file.parent)
            _link_from_roots(file.absolute().parent)
            for root in roots_above(str(file)):  # from where scripts are run
                for entry in Path(root).iterdir():
                    if not entry.name.startswith(".") and not os.path.lexists(entry.name):
                        Path(entry.name).symlink_to(entry)
    load_numpy()


def within_package(file: Path) -> ModuleType:
    """Import a file as part of the package that it is in, or of one that is its folder.

    Authors run it from a folder above, where Python takes every folder for a package.
    """
    file = Path(os.path.abspath(file))
    top = Path(package_of(str(file)) or file.parent)
    name, place = top.name.replace(".", "_"), [str(top)]
    while _is_taken(name, top):
        name += "_"
    if name not in sys.modules:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = place
        if (top / "__init__.py").is_file():
            spec = importlib.util.spec_from_file_location(name, top / "__init__.py", submodule_search_locations=place)
            assert spec is not None and spec.loader is not None
            package = sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(package)
            except BaseException:  # whose next import must not find the half of it
                sys.modules.pop(name, None)
                raise
    sys.modules[name].__path__ = place  # may be a link, beside which nothing lies
    return importlib.import_module(".".join((name, *file.relative_to(top).with_suffix("").parts)))


def _is_taken(package: str, folder: Path) -> bool:
    """Return True if another package than a folder's, imported or not, has a name; `find_above` has links to some."""
    if package in sys.modules:
        places = getattr(sys.modules[package], "__path__", [])
    elif (spec := importlib.util.find_spec(package)) is not None:
        places = spec.submodule_search_locations or []
    else:
        return False
    return list(map(os.path.realpath, places)) != [os.path.realpath(folder)]


def _link_from_roots(folder: Path) -> None:
    """Have what is linked here found by its path from the repositories and projects that its folder lies in, too."""
    links = list(Path.cwd().iterdir())
    for root in folder.parents:
        if any((root / name).exists() for name in _OF_ROOTS) and not is_broad(str(root)):
            place = folder.relative_to(root)
            if not Path(place.parts[0]).exists():
                place.mkdir(parents=True)
                for link in links:
                    (place / link.name).symlink_to(link.readlink())


def _drawn(rows: Generator[Any, Any, Any], luck: OwnRandom) -> Iterator[Any]:
    """Yield rows, with these states of the random generators while one is made."""
    while True:
        with luck:
            try:
                row = next(rows)
            except StopIteration:
                return
        yield row


def public_name(function: Any) -> str:
    """Return the name of a function, a partial or a callable object, as TRL logs it."""
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: Any) -> bool:
    """Return True if calling it returns a coroutine."""
    while hasattr(function, "func"):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def functions(tree: ast.Module) -> dict[str, list[str]]:
    """Return the parameter names of a file's functions."""
    parameters = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            parameters[node.name] = [
                parameter.arg for parameter in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            ]
    return parameters


def data_beside(file: Path, tree: ast.Module) -> str:
    """Return the default rows of a file: a usual definition, or a data file of the same name; empty if none.

    A text is no rows: scripts call the id of a data set so, and may load its rows under the same name later.
    """
    may_be_rows = dict.fromkeys(functions(tree), True)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            may_be_rows |= {alias.asname or alias.name: True for alias in node.names}
        may_be_rows |= {name: not isinstance(value, ast.Constant) for name, value in assignments(node)}
    for name in ROWS:
        if may_be_rows.get(name):
            return name
    kinds = [kind for kind in _rows.KINDS if kind != ".json"]  # which a script's settings have, too
    return next((file.with_suffix(kind).name for kind in kinds if file.with_suffix(kind).is_file()), "")
