"""Environments with `reset` and `step` in users' files, found by parsing."""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toprope.sdk.adapters._gymnasium import verifiable
from toprope.sdk.adapters._shared.listing import Listed, name_of_class
from toprope.sdk.adapters._shared.user_files import data_beside
from toprope.sdk.adapters._textarena.files import games_in
from toprope.sdk.discovery import first_line, parse
from toprope.sdk.wall.projects import is_broad, is_marked

__all__ = ["TAGS", "declared"]

TAGS = ("gymnasium", "multi-turn")
_BASES = {"Env", "BaseTextEnv", "TextEnv"}
_PLAIN = {"object", "ABC", "Generic"}
_WRAPPED = {"env", "envs", "env_fns"}
"""Parameters of classes that wrap other environments."""
_STEPPING = "BaseRLMEnv"
"""SkyRL-gym's base of environments that only score."""
_DEEPEST = 4
"""Most files one upon another, and most folders above a file, in which an author's own base is looked for."""
_MOST_BASES = 16

_Methods = dict[str, ast.FunctionDef]


@dataclass(frozen=True)
class _Names:
    """The classes of a file, and the names that it imports, each with its name there."""

    file: Path
    classes: dict[str, ast.ClassDef]
    imports: dict[str, tuple[ast.ImportFrom, str]]

    @classmethod
    def of(cls, file: Path, tree: ast.Module) -> _Names:
        classes: dict[str, ast.ClassDef] = {}
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef):
                classes.setdefault(statement.name, statement)
        sources = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imports = {alias.asname or alias.name: (node, alias.name) for node in sources for alias in node.names}
        return cls(file, classes, imports)


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List the classes of a file with `step` and `reset`, or `init` and rows."""
    rows = data_beside(file, tree)
    classes: dict[str, tuple[ast.ClassDef, set[str]]] = {}
    inherited = set[str]()
    others = games_in(tree)  # TextArena's
    names = _Names.of(file, tree)
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node in others:
            continue
        # `gym.Env` is not a class `Env` of this file.
        bases = {base.id for base in _bases(node) if isinstance(base, ast.Name)} & classes.keys()
        if bases and _wraps(_defined(node)):
            continue
        own = _methods(node) or _methods_with_own_base(node, names)
        if methods := own.union(*(classes[base][1] for base in bases)):
            classes[node.name] = node, methods
            inherited.update(bases)
    environments = [pair for name, pair in classes.items() if name not in inherited and not name.startswith("_")]
    listed = []
    for node, methods in environments:
        text = first_line(ast.get_docstring(node)) or first_line(ast.get_docstring(tree))
        target = {"file": str(file), "class": node.name, "rows": rows if "init" in methods else ""}
        problem = f"No rows: add a list `rows` with prompts, or {file.stem}.jsonl beside {file.name}."
        listed.append(
            Listed(
                name=name_of_class(file, node.name, alone=len(environments) == 1),
                target=json.dumps({key: value for key, value in target.items() if value}),
                description=text or f"{node.name} of {file.name}, an environment with reset and step",
                tags=TAGS,
                problem=problem if "init" in methods and not rows else "",
            )
        )
    return listed


def _bases(node: ast.ClassDef) -> list[ast.expr]:
    """The bases of a class without their type parameters, as in `gym.Env[str, int]`; both of `gym.Env if gym else
    object`."""
    bases: list[ast.expr] = []
    for base in node.bases:
        bases += [base.body, base.orelse] if isinstance(base, ast.IfExp) else [base]
    return [base.value if isinstance(base, ast.Subscript) else base for base in bases]


def _name_of(base: ast.expr) -> str:
    return base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")


def _defined(node: ast.ClassDef) -> _Methods:
    return {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}


def _is_excluded(node: ast.ClassDef) -> bool:
    return node.name.startswith("_") or node.name.endswith("Client")  # the latter asks a server


def _wraps(methods: _Methods) -> bool:
    return "__init__" in methods and bool(_WRAPPED & _asked_by(methods["__init__"]))


def _methods(node: ast.ClassDef) -> set[str]:
    """The methods of a class if they make it an environment of this kind; empty if not."""
    bases, defined = set(map(_name_of, _bases(node))), _defined(node)
    if verifiable.BASE in bases and "_generate" in defined:
        return set(defined)
    if _STEPPING in bases:
        return {"init", "step", *defined}
    if _is_excluded(node) or "step" not in defined or len(defined["step"].args.args) != 2:
        return set()
    if "BaseTextEnv" in bases:
        return {"init", *defined}
    return set(defined) if "reset" in defined and (not bases or bases & _BASES) else set()


def _methods_with_own_base(node: ast.ClassDef, names: _Names) -> set[str]:
    """Like `_methods`, with those of a base class that the author defines, in this file or in one that it imports."""
    if _is_excluded(node) or {_name_of(base) for base in _bases(node)} <= _PLAIN:
        return set()
    methods = _inherited(node, names) or {}
    if not {"step", "reset"} <= methods.keys() or len(methods["step"].args.args) != 2:
        return set()
    is_abstract = any(_name_of(mark) == "abstractmethod" for one in methods.values() for mark in one.decorator_list)
    return set() if _wraps(methods) or is_abstract or _asked_by(methods["reset"]) - {"seed"} else set(methods)


def _asked_by(method: ast.FunctionDef) -> set[str]:
    """The parameters without a default, besides `self`."""
    arguments = method.args
    return {argument.arg for argument in arguments.args[1 : len(arguments.args) - len(arguments.defaults)]}


def _inherited(node: ast.ClassDef, names: _Names) -> _Methods | None:
    """The methods of a class and of its bases; None if one of these is not the author's own."""
    line = [(node, names)]
    for child, around in line:  # its bases are added meanwhile
        for base in _bases(child):
            if _name_of(base) in _PLAIN or (isinstance(base, ast.Attribute) and _name_of(base) in _BASES):
                continue
            found = _own_class(base.id, around) if isinstance(base, ast.Name) else None
            if found is None or len(line) > _MOST_BASES:
                return None
            if all(found[0] is not known for known, _ in line):
                line.append(found)
    methods: _Methods = {}
    for child, _ in reversed(line):
        methods |= _defined(child)
    return methods


def _own_class(name: str, names: _Names) -> tuple[ast.ClassDef, _Names] | None:
    """A class of a file, or of a file of its project that it imports from, with the names of that file."""
    for _ in range(_DEEPEST):  # packages import what their modules define
        if name in names.classes:
            return names.classes[name], names
        if name not in names.imports:
            break
        source, name = names.imports[name]
        place = next(filter(os.path.isfile, _places(names.file, source)), None)
        if place is None:
            break
        try:
            names = _names_in(place, os.stat(place).st_mtime_ns)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            break
    return None


@functools.lru_cache(maxsize=8)
def _names_in(file: Path, _changed_at: int) -> _Names:
    """Read a file whose classes many others are derived from once, not for each of them."""
    return _Names.of(file, parse(file))


def _places(file: Path, node: ast.ImportFrom) -> Iterator[Path]:
    """Yield the files that an import may name: of its package, or from a folder above up to the project's root."""
    above = file.absolute().parents
    roots = [above[node.level - 1]] if 0 < node.level <= len(above) else []
    for folder in above[:_DEEPEST] if not node.level else ():
        if is_broad(str(folder)):
            break
        roots.append(folder)
        if is_marked(str(folder)):
            break
    for root in roots:
        place = root.joinpath(*(node.module or "").split("."))
        yield from (place / "__init__.py", place.with_name(f"{place.name}.py"))
