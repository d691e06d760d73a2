"""Games of TextArena in a user's file: classes derived from its `Env`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._shared.user_files import UserFile
from toprope.sdk.discovery import first_line, imports_in

__all__ = ["declared", "game_of"]

_PACKAGE = "textarena"


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List the games of a file."""
    if not any(name.partition(".")[0] == _PACKAGE for level, name in imports_in(tree) if not level):
        return []
    games = [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_game(node)]
    return [
        Listed(
            name=file.stem if len(games) == 1 else f"{file.stem}-{node.name.lower()}",
            target=f"{file}:{node.name}",
            description=first_line(ast.get_docstring(node)) or f"{node.name} of {file.name}, a game of TextArena",
            tags=(_PACKAGE, "game", "multi-turn"),
        )
        for node in games
    ]


def _is_game(node: ast.ClassDef) -> bool:
    bases = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases}
    defined = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
    return "Env" in bases and {"reset", "step"} <= defined and not node.name.startswith("_")


def game_of(target: str) -> tuple[UserFile, type, Any]:
    """Return the file of a target `/path/file.py:Class`, the game's class, and what TextArena would register of it.

    Raises:
        LoadError: The file does not load, or lacks the class.
    """
    path, _, name = target.rpartition(":")
    user = UserFile(path)
    kind = user.get(name, "the game")
    parameters = inspect.signature(kind).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return user, kind, SimpleNamespace(kwargs=defaults, default_wrappers=None)
