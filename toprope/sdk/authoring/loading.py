"""Create the environment that a source names, with errors that give the place and the remedy.

A source is a user's file with an attribute of it, or one of our adapters with its target. Only workers call this,
because it runs the user's code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from toprope.sdk.authoring.environment import Environment
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import Failure, LoadError
from toprope.sdk.wall.paths import folders_above, package_of, project_of
from toprope.sdk.wall.projects import roots_above

__all__ = ["Loaded", "attribute_of", "find_above", "import_root", "load", "module_of", "search_from"]

_ADAPTERS = Path(__file__).parent.parent / "adapters"


@dataclass(frozen=True)
class Loaded:
    """An environment before it is configured."""

    environment: Environment
    name: str
    """Its own name, or the name of its file."""
    near: str
    """Folder of its code, for error messages."""
    versions: dict[str, str]
    """`python`, `sha256` of a user's file, and each of the environment's `packages`."""


def load(source: Mapping[str, Any]) -> Loaded:
    """Load an environment.

    Args:
        source: `{"file": path, "attribute": name or None}` or `{"adapter": name, "target": name}`.

    Raises:
        LoadError: It cannot be loaded.
    """
    if source.get("adapter"):
        return _from_adapter(str(source["adapter"]), str(source.get("target") or ""))
    if source.get("file"):
        return _from_file(Path(str(source["file"])).absolute(), source.get("attribute"))
    raise LoadError("A source needs a file, or an adapter and its target.")


def _from_adapter(adapter: str, target: str) -> Loaded:
    adapters = sorted(path.stem for path in _ADAPTERS.glob("[a-z]*.py"))
    if adapter not in adapters:
        raise LoadError(f"Unknown adapter {adapter!r}. {nearest(adapter, adapters, 'Adapters')}")
    module = importlib.import_module(f"toprope.sdk.adapters.{adapter}")
    try:
        environment = module.make(target)
    except (LoadError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the ecosystem's import may raise anything
        failure = Failure.of(error)
        raise LoadError(f"{adapter} does not load: {failure.type}: {failure.message}", failure.where) from error
    near = os.path.dirname(
        environment.files[0] if environment.files else inspect.getsourcefile(type(environment)) or ""
    )
    return Loaded(environment, environment.name or f"{adapter}/{target}", near, _versions(environment))


def attribute_of(file: Path, name: str) -> Any:
    """An attribute of a user's file.

    Raises:
        LoadError: The file does not load, or has no such attribute.
    """
    module = module_of(file)
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        raise LoadError(f"{file.name} has no {name!r}. {nearest(name, public, 'It defines')}", f"{file}:1")
    return getattr(module, name)


def module_of(file: Path) -> ModuleType:
    """Run a user's file as a new module.

    Raises:
        LoadError: It does not load.
    """
    if not file.is_file():
        raise LoadError(f"The file {file} does not exist.")
    search_from(file)
    return _import(file, str(file.parent))


def search_from(file: Path) -> None:
    """Have what a file imports found beside it first, then as `find_above` says."""
    folder = str(file.parent)
    if folder not in sys.path[:1]:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    _find_beside(folder)
    find_above(file)


class _Beside:
    """Finds modules in a folder that nobody behind the wall can list, such as a HOME, where only Python files are open.

    Args:
        folder: Its path.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = os.path.join(self.folder, f"{name}.py")
        return importlib.util.spec_from_file_location(name, file) if path is None and os.path.isfile(file) else None


def _find_beside(folder: str) -> None:
    try:
        os.scandir(folder).close()
    except PermissionError:
        if not any(isinstance(finder, _Beside) and finder.folder == folder for finder in sys.meta_path):
            sys.meta_path.append(_Beside(folder))


def find_above(file: Path) -> None:
    """Have a file's imports by the full name of its package, and from the root of its repository or project, found."""
    for place in (import_root(file), *map(_place_with, folders_above(str(file))), *roots_above(str(file))):
        if place not in sys.path:
            sys.path.append(place)


def import_root(file: Path) -> str:
    """The folder from which a file's package is imported: the one above it, or one with a link to it alone."""
    package = package_of(str(file))
    return (project_of(package) or _place_with(package)) if package else str(file.parent.absolute())


@functools.cache
def _place_with(folder: str) -> str:
    """A folder with a link to another alone. Behind a wall, what is beside that one cannot be listed."""
    place = tempfile.mkdtemp(dir=_places())
    os.symlink(folder, os.path.join(place, os.path.basename(folder)))
    return place


@functools.cache
def _places() -> str:
    place, process = tempfile.mkdtemp(prefix="above-"), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not at the end of a fork
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(remove)
    return place


def _from_file(file: Path, attribute: str | None) -> Loaded:
    folder = str(file.parent)
    value = _attribute(module_of(file), file, attribute)
    environment = _instance(value, file, folder)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    versions = _versions(environment) | {"sha256": digest}
    return Loaded(environment, environment.name or file.stem, folder, versions)


def _import(file: Path, folder: str) -> ModuleType:
    # Under its plain name, processes that the author starts can import the module; never replace another module.
    is_taken = file.stem in sys.modules or file.stem in sys.stdlib_module_names
    name = f"environment_{file.stem}" if is_taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise LoadError(f"{file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            package = package_of(str(file))
            if not package or "relative import" not in str(error):
                raise
            inside = Path(os.path.abspath(file)).relative_to(Path(package).parent)
            root = import_root(file)
            sys.path.insert(0, root)  # its project may be installed as well
            try:
                module = importlib.import_module(".".join(inside.with_suffix("").parts))
            finally:
                with contextlib.suppress(ValueError):  # the module removed it
                    sys.path.remove(root)
            if os.path.realpath(module.__file__ or "") != os.path.realpath(file):
                raise ImportError(f"the name of its package is taken by {module.__file__}: rename it") from None
            sys.modules[name] = module
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an author's file may raise anything, SystemExit too
        sys.modules.pop(name, None)
        failure = Failure.of(error, folder)
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f" Install the package of {error.name!r} for {sys.executable}, which runs this environment."
            if file.is_symlink():
                hint = (
                    " This file is a link: what lies beside its target is not found. Link or name its folder instead."
                )
        elif isinstance(error, ImportError) and "relative import" in str(error):
            hint = " An environment's file stands alone: import its neighbours by their plain names."
        elif isinstance(error, PermissionError):
            hint = " The wall closes hidden files and what lies elsewhere; the owner can open it by `reads`."
        raise LoadError(
            f"{file.name} does not load: {failure.type}: {failure.message}.{hint}", failure.where
        ) from error
    return module


def _attribute(module: ModuleType, file: Path, attribute: str | None) -> Any:
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and value.__module__ == module.__name__
    }
    if attribute is None:
        public = [value for name, value in classes.items() if not name.startswith("_")]
        if len(public) == 1:
            return public[0]
        raise LoadError(f"{file.name} has {len(public)} environments: name one. {nearest('', classes, 'Environments')}")
    if hasattr(module, attribute):
        return getattr(module, attribute)
    raise LoadError(f"{file.name} has no {attribute!r}. {nearest(attribute, classes, 'Environments')}", f"{file}:1")


def _instance(value: Any, file: Path, folder: str) -> Environment:
    if isinstance(value, Environment):
        return value
    if not callable(value):
        raise LoadError(f"{file.name} gives {type(value).__name__}, which neither is nor creates an environment.")
    label = getattr(value, "__name__", type(value).__name__)
    try:
        environment = value()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an author's constructor may raise anything
        failure = Failure.of(error, folder)
        message = f"{label}() raised {failure.type}: {failure.message}"
        raise LoadError(f"{message}. It is called without arguments.", failure.where) from error
    if not isinstance(environment, Environment):
        raise LoadError(f"{label}() returned {type(environment).__name__}, not a toprope.sdk.Environment.")
    return environment


def _versions(environment: Environment) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in environment.packages:
        import importlib.metadata  # takes 20 ms, and most environments do not need it

        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    for file in environment.files:
        with contextlib.suppress(OSError):
            versions[f"sha256 {os.path.basename(file)}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return versions
