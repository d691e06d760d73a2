"""Objects that a user's file defines itself: the only ones that an agent may name.

A recipe, a reward function and a sweep name objects of the owner's files. A file's namespace also holds everything that
it imports (`Popen`), so a name is looked up in the syntax tree first: it must belong to a function or class that the
file defines, to a lambda, or to an instance of one of its classes, and nothing else may bind it. A class must have one
of the wanted methods. Nothing of the file runs before that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toprope.sdk.authoring.loading import attribute_of
from toprope.sdk.discovery import parse
from toprope.sdk.errors import LoadError

__all__ = ["CALL", "defined_object", "definition_problem", "fitting_definitions"]

CALL = "call"
"""Among wanted methods: the object itself is called."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def definition_problem(file: Path, name: str, wanted: Sequence[str]) -> str:
    """Explain that a name does not mean a definition of this file with one of the wanted methods; empty if it does.

    Args:
        file: A user's file; it is parsed, not run.
        name: Name at the top level of the file.
        wanted: Names of methods, one of which a class must have; `CALL` also admits functions. Empty: any class.

    Raises:
        LoadError: The file cannot be read as Python.
    """
    return _Definitions(file).problem(name, wanted)


def fitting_definitions(file: Path, wanted: Sequence[str]) -> list[str]:
    """The public names for which `definition_problem` finds none, in the file's order. Raises: as that."""
    definitions = _Definitions(file)
    return [name for name in definitions.names if not name.startswith("_") and not definitions.problem(name, wanted)]


def defined_object(file: Path, name: str, wanted: Sequence[str]) -> Any:
    """Run the file and return the object that `name` means there. See `definition_problem`.

    Raises:
        LoadError: It is not a definition of this file, has none of the wanted methods, or the file does not load.
    """
    if problem := definition_problem(file, name, wanted):
        raise LoadError(problem, f"{file}:1")
    value = attribute_of(file, name)
    kind = value if isinstance(value, type) else type(value)
    if wanted and not any(_has(kind, method) for method in wanted):
        raise LoadError(f"{name} of {file.name} has none of the methods {_listed(wanted)}.", f"{file}:1")
    return value


def _has(kind: type, method: str) -> bool:
    name = "__call__" if method == CALL else method
    return any(name in vars(base) for base in kind.__mro__ if base is not object)


class _Definitions:
    """The top-level names of a file, with the statements that bind them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            tree = parse(file)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise LoadError(f"{file} cannot be read as Python: {error}.", f"{file}:1") from None
        self._bound: dict[str, list[ast.AST]] = {}
        self._star = 0
        """Line of the last `from x import *`, which may bind any name again."""
        for name, node in _bindings(tree):
            if name == "*":
                self._star = max(self._star, getattr(node, "lineno", 0))
            else:
                self._bound.setdefault(name, []).append(node)

    @property
    def names(self) -> list[str]:
        return list(self._bound)

    def problem(self, name: str, wanted: Sequence[str]) -> str:
        file, nodes = self._file.name, self._bound.get(name, [])
        if not nodes:
            fitting = [
                candidate
                for candidate in self.names
                if not candidate.startswith("_") and not self.problem(candidate, wanted)
            ]
            hint = f"It defines {', '.join(fitting[:12])}." if fitting else "It defines nothing that fits."
            return f"{file} does not define {name!r}. {hint}"
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                return f"{file} imports {name!r} and does not define it: only the file's own definitions may be named."
        if any(getattr(node, "lineno", 0) < self._star for node in nodes):
            return f"A later `import *` in {file} may replace {name!r}: only the file's own definitions may be named."
        for node in nodes:
            if problem := self._unfit(name, node, wanted, len(nodes)):
                return problem
        return ""

    def _unfit(self, name: str, node: ast.AST, wanted: Sequence[str], bindings: int) -> str:
        if isinstance(node, ast.ClassDef):
            return self._lacking(node, wanted)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and bindings == 1:
            bound = self._bound.get(value.func.id, [])
            if len(bound) == 1 and isinstance(bound[0], ast.ClassDef):
                return self.problem(value.func.id, wanted)
        if isinstance(node, _Function) or (isinstance(value, ast.Lambda) and bindings == 1):
            if CALL in wanted:
                return ""
            return f"{name} of {self._file.name} is a function, not a class with {_listed(wanted)}."
        return (
            f"{name!r} in {self._file.name} is assigned from elsewhere, or more than once: only functions, classes and "
            "instances of classes that the file itself defines may be named."
        )

    def _lacking(self, node: ast.ClassDef, wanted: Sequence[str]) -> str:
        """Say that a class lacks the wanted methods; empty if it has one, or if a class from elsewhere may have it."""
        methods, known = self._methods(node, set())
        if not wanted or not known or methods & {"__call__" if method == CALL else method for method in wanted}:
            return ""
        return f"{node.name} of {self._file.name} has no method {_listed(wanted)}."

    def _methods(self, node: ast.ClassDef, seen: set[str]) -> tuple[set[str], bool]:
        """The methods of a class with those of its bases in this file, and True if all bases are known."""
        seen.add(node.name)
        methods = {name for name, bound in _bindings(node) if isinstance(bound, _Function)}
        known = not node.keywords
        for base in node.bases:
            nodes = self._bound.get(base.id, []) if isinstance(base, ast.Name) else []
            if len(nodes) == 1 and isinstance(nodes[0], ast.ClassDef) and nodes[0].name not in seen:
                inherited, all_known = self._methods(nodes[0], seen)
                methods, known = methods | inherited, known and all_known
            else:
                known = False
        return methods, known


def _bindings(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Every name that the statements of a scope bind, with the statement; `*` for `import *`.

    A function that declares a name `global` binds it in the module, too.
    """
    pending: list[tuple[ast.AST, ast.AST]] = [(node, node) for node in reversed(scope.body)]
    while pending:
        node, statement = pending.pop()
        if isinstance(node, ast.stmt):
            statement = node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield (alias.asname or alias.name).partition(".")[0], node
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id, statement
            case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name):
                yield name, node
            case ast.MatchStar(name=str() as name) | ast.MatchMapping(rest=str() as name):
                yield name, node
        if isinstance(node, _SCOPES):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Global):
                    yield from ((name, inner) for name in inner.names)
        else:
            pending += [(child, statement) for child in reversed(list(ast.iter_child_nodes(node)))]


def _listed(wanted: Sequence[str]) -> str:
    return " or ".join("__call__" if method == CALL else method for method in wanted)
