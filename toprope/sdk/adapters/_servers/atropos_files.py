"""Environments of Atropos in files: classes whose base is its `BaseEnv`, by whatever name the file reaches it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import assignments, first_line, imports_in, literal, parse

__all__ = ["declared"]

_PACKAGE, _BASE = "atroposlib", "BaseEnv"
_ITEMS = "get_next_item"
_DEEPEST = 3


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List the Atropos environments in a user's file, by their own `name` if they have one."""
    if _PACKAGE not in {name.split(".")[0] for level, name in imports_in(tree) if not level} and not _beside(
        file, tree
    ):
        return []
    found = _concrete(_classes(file, tree, _DEEPEST))
    listed = []
    for node in found.values():
        text = first_line(ast.get_docstring(node) or ast.get_docstring(tree))
        plain = file.stem if len(found) == 1 else f"{file.stem}_{node.name.lower()}"
        listed.append(Listed(_own_name(node) or plain, f"{file}:{node.name}", text, tags=("atropos",)))
    names = [one.name for one in listed]
    return [
        Listed(f"{one.name}_{node.name.lower()}" if names.count(one.name) > 1 else one.name, one.target,
               one.description, tags=one.tags)
        for one, node in zip(listed, found.values(), strict=True)
    ]  # fmt: skip


def _classes(file: Path, tree: ast.Module, depth: int) -> dict[str, ast.ClassDef]:
    """Return the environments that a file defines, by class name."""
    bases = set(_names_of_base(file, tree, depth))
    found: dict[str, ast.ClassDef] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).partition("[")[0] in bases for base in node.bases):
            bases.add(node.name)
            found[node.name] = node
    return found


def _concrete(found: dict[str, ast.ClassDef]) -> dict[str, ast.ClassDef]:
    """Leave out the classes that have no items and are bases of one that has: their file shares code by them."""

    def bases(node: ast.ClassDef) -> list[str]:
        named = (ast.unparse(base).partition("[")[0] for base in node.bases)
        return [name for name in named if name != node.name]  # the imported class of the same name

    def has_items(node: ast.ClassDef) -> bool:
        own = any(isinstance(one, ast.AsyncFunctionDef | ast.FunctionDef) and one.name == _ITEMS for one in node.body)
        return own or any(has_items(found[base]) for base in bases(node) if base in found)

    shared: set[str] = set()
    unread = [node for node in found.values() if has_items(node)]
    while unread:
        above = {base for base in bases(unread.pop()) if base in found and not has_items(found[base])}
        unread += [found[base] for base in above - shared]
        shared |= above
    return {name: node for name, node in found.items() if name not in shared}


def _names_of_base(file: Path, tree: ast.Module, depth: int) -> Iterator[str]:
    """Yield the expressions by which a file can name `BaseEnv`, or an environment of a file beside it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == _PACKAGE:
                    yield f"{one.asname or one.name}.{_BASE}"
                    yield f"{one.asname or _PACKAGE}.envs.base.{_BASE}"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == _PACKAGE:
            for one in node.names:
                word = one.asname or one.name
                yield from (word,) if one.name == _BASE else (f"{word}.{_BASE}", f"{word}.base.{_BASE}")
        elif isinstance(node, ast.ImportFrom) and depth > 0 and (other := _file_of(file, node)) is not None:
            try:
                theirs = _classes(other, parse(other), depth - 1)
            except (OSError, SyntaxError, ValueError):
                continue
            yield from (one.asname or one.name for one in node.names if one.name in theirs)


def _file_of(file: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file beside this one that an import reads; None if it reads another."""
    if not node.module:
        return None
    folder = file.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    other = folder.joinpath(*node.module.split(".")).with_suffix(".py")
    return other if other.is_file() and other != file else None


def _beside(file: Path, tree: ast.Module) -> bool:
    return any(isinstance(node, ast.ImportFrom) and _file_of(file, node) is not None for node in tree.body)


def _own_name(node: ast.ClassDef) -> str:
    """Return the value of the class's `name`, as a valid name; empty if it has none."""
    values = (literal(value) for one in node.body for name, value in assignments(one) if name == "name")
    own = next((value for value in values if isinstance(value, str)), "")
    return re.sub(r"[^a-z0-9_-]+", "-", own.lower()).strip("-_")[:64]
