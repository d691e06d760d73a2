"""List tasksets of verifiers, and packages with `load_environment`, from files."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._verifiers.load_environment import BEFORE
from toprope.sdk.discovery import assignments, first_line, imports_in, literal, parse, searched

__all__ = ["OPTIONAL", "REQUIREMENTS", "declared", "installed", "more_requirements"]

REQUIREMENTS = ("verifiers==0.4.*", "uv")
_TEST = re.compile(r"test_.*|.*_test|tests?|conftest")
_PROGRAMS = REQUIREMENTS[1:]
_PACKAGE = "verifiers"
_BROUGHT = {"agents": "openai-agents", "datasets": "datasets", "requests": "requests"}
"""Modules that verifiers required before 0.4, and their packages: authors import them without a requirement."""
OPTIONAL = tuple(_BROUGHT.values())
"""Requirements told from imports alone: tasks may be played without them."""
_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def installed(site_packages: Path) -> list[Listed]:
    """List the environments that installed packages provide, whatever they say they require."""
    before = _is_before(site_packages)
    environments = []
    for metadata in sorted(site_packages.glob("*.dist-info/METADATA")):
        try:
            text = metadata.read_text(errors="replace").partition("\n\n")[0]
            record = metadata.with_name("RECORD").read_text(errors="replace")
        except OSError:
            continue
        summary = next((line[9:] for line in text.splitlines() if line.startswith("Summary: ")), "")
        content = _digest(record)
        of_wheel = []
        for name in _top_level(line.partition(",")[0].removeprefix("./") for line in record.splitlines()):
            module = name.removesuffix("/__init__.py").removesuffix(".py")
            if module != _PACKAGE and (listed := _listed(site_packages / name, module, summary, before)):
                of_wheel.append((module, replace(listed, content=content)))
        # A test imports the environment, but one that is alone is no test.
        without_tests = [listed for module, listed in of_wheel if not _TEST.fullmatch(module)]
        environments += without_tests or [listed for _, listed in of_wheel]
    return environments


def more_requirements(place: Path) -> tuple[str, ...]:
    """Return what the packages in a folder need besides their own requirements: the right version of verifiers, which
    some authors leave out, and the program uv, with which verifiers 0.4 starts harnesses and servers of tasksets.

    Args:
        place: An interpreter's packages, or the folder of a project.
    """
    if (place / _PACKAGE).is_dir():  # an interpreter
        environments = installed(place)
        if _is_before(place) or not environments:
            return ()
        if any(environment.needs == "install" for environment in environments):
            return BEFORE
        return () if any(place.glob("uv-*.dist-info")) else _PROGRAMS
    files = [
        *place.glob("*.py"),
        *place.glob("*/__init__.py"),
        *place.glob("src/*.py"),
        *place.glob("src/*/__init__.py"),
    ]
    kinds = {_kind_of(file) for file in files if file.parent.name not in ("tests", "test")}
    if "taskset" in kinds:
        return (*(_PROGRAMS if _names_verifiers(place) else REQUIREMENTS), *_brought(place, files))
    return BEFORE if "before" in kinds else ()


def _brought(place: Path, files: Iterable[Path]) -> list[str]:
    """Return the packages that modules and packages of a project import and verifiers once brought along.

    The project's own modules and folders where an import may find them, and imports of its tests, do not count.
    """
    imported: set[str] = set()
    for file in files:
        for module in file.parent.rglob("*.py") if file.name == "__init__.py" else (file,):
            if {"test", "tests"}.isdisjoint(module.relative_to(place).parts) and not _TEST.fullmatch(module.stem):
                with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                    tree = _WithoutTry().visit(parse(module))
                    names = {name.partition(".")[0] for level, name in imports_in(tree) if not level}
                    # Python looks beside a script, but not beside a module of a package.
                    beside = () if (module.parent / "__init__.py").is_file() else (module.parent,)
                    imported |= {
                        name
                        for name in names.intersection(_BROUGHT) - imported
                        if not _is_own(name, place, place / "src", *beside)
                    }
    return [package for module, package in _BROUGHT.items() if module in imported]


def _is_own(name: str, *folders: Path) -> bool:
    """Return True if one of the folders has a module of that name, or a folder with modules at any depth."""
    return any(
        (folder / f"{name}.py").is_file() or any(any(inner.glob("*.py")) for inner, _ in searched(folder / name))
        for folder in folders
    )


class _WithoutTry(ast.NodeTransformer):
    """Removes what authors try and can do without: a failed import reaches a handler that does not raise."""

    def visit_Try(self, node: ast.Try | ast.TryStar) -> ast.AST | None:
        handler = next(filter(_gets_import_errors, node.handlers), None)
        if handler is None or any(isinstance(inner, ast.Raise) for inner in ast.walk(handler)):
            return self.generic_visit(node)
        return None

    visit_TryStar = visit_Try


def _gets_import_errors(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(
        isinstance(node, ast.Name) and node.id in _IMPORT_ERRORS for node in ast.walk(handler.type)
    )


def _names_verifiers(folder: Path) -> bool:
    """Return True if a project requires verifiers by version; another version than one by address may be right here."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        requirements = [
            requirement
            for requirement in project["project"]["dependencies"]
            if re.match(rf"\s*{_PACKAGE}\b(?!-)", requirement)
        ]
        source = project.get("tool", {}).get("uv", {}).get("sources", {}).get(_PACKAGE, {"index": ""})
        return bool(requirements) and "@" not in requirements[0] and "index" in source
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _digest(record: str) -> str:
    """Return a digest of a wheel's files; empty if its record has no hashes, as of a link.

    Metadata does not count, nor do programs beside the packages, which name their interpreter.
    """
    lines = sorted(line.removeprefix("./") for line in record.splitlines() if ",sha256=" in line)
    files = [line for line in lines if ".dist-info/" not in line and not line.startswith("../")]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16] if files else ""


def _top_level(files: Iterable[str]) -> Iterable[str]:
    """Return a wheel's modules, and the `__init__.py` of its packages, which may have been copied beside the wheel."""
    parts = [name.split("/") for name in files if name.endswith(".py")]
    return dict.fromkeys(
        path_parts[0] if len(path_parts) == 1 else f"{path_parts[0]}/__init__.py" for path_parts in parts
    )


def _is_before(site_packages: Path) -> bool:
    """Return True if the installed verifiers is older than 0.2."""
    metadata = next(site_packages.glob(f"{_PACKAGE}-*.dist-info"), None)
    version = metadata.name.removeprefix(f"{_PACKAGE}-").removesuffix(".dist-info") if metadata is not None else ""
    return version.startswith(("0.0.", "0.1."))


def _kind_of(file: Path) -> str:
    """Return `taskset`, `before` (load_environment), or nothing."""
    try:
        text = file.read_text(errors="replace")
        if "load_environment" not in text and "Taskset" not in text:
            return ""
        tree = parse(file)
    except (OSError, SyntaxError, ValueError):
        return ""
    values = (value for node in tree.body for name, value in assignments(node) if name == "__all__")
    exported = literal(next(values, None))
    names = [str(name) for name in exported] if isinstance(exported, list | tuple) else []
    if any(name.endswith("Taskset") for name in names) or any(node.name in names for node in _tasksets(tree)):
        return "taskset"
    provided = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] != _PACKAGE):
            provided |= {alias.asname or alias.name for alias in node.names}
    return "before" if "load_environment" in provided else ""


def _listed(file: Path, module: str, summary: str, before: bool) -> Listed | None:
    kind = _kind_of(file)
    if not kind:
        return None
    description = first_line(ast.get_docstring(parse(file))) or summary
    if (kind == "before") == before:
        return Listed(module, module, description, tags=("verifiers",))
    needed = BEFORE[0] if kind == "before" else REQUIREMENTS[0]
    problem = f"It is written for {needed}. The owner adds it again: toprope env add PACKAGE -r '{needed}'"
    return Listed(module, module, description, tags=("verifiers",), problem=problem, needs="install")


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List tasksets in a user's file."""
    tasksets = list(_tasksets(tree))
    return [
        Listed(
            name=file.stem if len(tasksets) == 1 else f"{file.stem}_{node.name.lower()}",
            target=f"{file}:{node.name}",
            description=first_line(ast.get_docstring(node)) or first_line(ast.get_docstring(tree)),
            tags=("verifiers",),
        )
        for node in tasksets
    ]


def _tasksets(tree: ast.Module) -> Iterator[ast.ClassDef]:
    modules, names = set(), set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] == _PACKAGE}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "Taskset"}
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "v1"}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            plain = isinstance(base, ast.Name) and base.id in names
            dotted = isinstance(base, ast.Attribute) and base.attr == "Taskset" and ast.unparse(base.value) in modules
            if plain or dotted:
                names.add(node.name)
                yield node
                break
