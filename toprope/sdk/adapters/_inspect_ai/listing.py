"""Tasks of inspect-ai in files and packages."""

from __future__ import annotations

import ast
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import first_line, parse

__all__ = ["declared", "installed"]

_PACKAGE = "inspect_ai"


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List functions with inspect's `@task` in a user's file."""
    decorators = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            decorators |= {one.asname or one.name for one in node.names if one.name == "task"}
        elif isinstance(node, ast.Import):
            decorators |= {f"{one.asname or one.name}.task" for one in node.names if one.name == _PACKAGE}
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).partition("(")[0] in decorators for one in node.decorator_list)
    ]
    return [_listed(node.name, f"{file}@{node.name}", ast.get_docstring(node)) for node in found]


def installed(site_packages: Path) -> list[Listed]:
    """List tasks that installed packages register with inspect."""
    found = []
    for file in sorted(site_packages.glob("*.dist-info/entry_points.txt")):
        try:
            section = file.read_text(errors="replace").partition("[inspect_ai]")[2].partition("\n[")[0]
        except OSError:
            continue
        for line in section.splitlines():
            module = line.partition("=")[2].strip().partition(":")[0]
            registry = site_packages / (module.replace(".", "/") + ".py")
            if not module or not registry.is_file():
                continue
            try:
                tree = parse(registry)
            except (OSError, SyntaxError, ValueError):
                continue
            names = [one for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names]
            package = module.split(".")[0]
            found += [_listed(f"{package}/{one.name}", f"{package}/{one.name}", "") for one in names if one.name != "*"]
    return found


def _listed(name: str, target: str, text: str | None) -> Listed:
    return Listed(name, target, first_line(text), tags=("inspect", "evaluation"))
