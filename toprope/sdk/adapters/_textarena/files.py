"""Games of TextArena in a user's file: classes derived from its `Env`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toprope.sdk.adapters._shared.listing import Listed, name_of_class
from toprope.sdk.adapters._shared.user_files import UserFile
from toprope.sdk.discovery import first_line, imports_in

__all__ = ["declared", "game_of", "games_in", "state_of"]

_PACKAGE = "textarena"


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List the games of a file."""
    games = games_in(tree)
    return [
        Listed(
            name=name_of_class(file, node.name, alone=len(games) == 1),
            target=f"{file}:{node.name}",
            description=first_line(ast.get_docstring(node)) or f"{node.name} of {file.name}, a game of TextArena",
            tags=(_PACKAGE, "game", "multi-turn"),
        )
        for node in games
    ]


def games_in(tree: ast.Module) -> list[ast.ClassDef]:
    """Return the games of a file. Classes of Gymnasium look alike, but their `reset` has no number of players."""
    if not any(name.partition(".")[0] == _PACKAGE for level, name in imports_in(tree) if not level):
        return []
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_game(node)]


def _is_game(node: ast.ClassDef) -> bool:
    bases = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases}
    defined = {method.name: method.args for method in node.body if isinstance(method, ast.FunctionDef)}
    if "Env" not in bases or not {"reset", "step"} <= defined.keys() or node.name.startswith("_"):
        return False
    return "num_players" in [parameter.arg for parameter in (*defined["reset"].args, *defined["reset"].kwonlyargs)]


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


def state_of(user: UserFile, kind: type) -> str:
    """Return the text that tells a game's kind of state: its class, as others of the file may be for more players; the
    whole file if a function outside makes it."""
    classes = (inspect.getsource(each) for each in kind.__mro__ if each.__module__ == kind.__module__)
    text = "\n".join(classes)
    return text if "PlayerState" in text else user.path.read_text("utf-8", "replace")
