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
            decorators |= {alias.asname or alias.name for alias in node.names if alias.name == "task"}
        elif isinstance(node, ast.Import):
            decorators |= {f"{alias.asname or alias.name}.task" for alias in node.names if alias.name == _PACKAGE}
    tasks = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).partition("(")[0] in decorators for decorator in node.decorator_list)
    ]
    return [_listed(node.name, f"{file}@{node.name}", ast.get_docstring(node)) for node in tasks]


def installed(site_packages: Path) -> list[Listed]:
    """List tasks that installed packages register with inspect."""
    tasks = []
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
            names = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
            package = module.split(".")[0]
            tasks += [
                _listed(f"{package}/{alias.name}", f"{package}/{alias.name}", "")
                for alias in names
                if alias.name != "*"
            ]
    return tasks


def _listed(name: str, target: str, text: str | None) -> Listed:
    return Listed(name, target, first_line(text), tags=("inspect", "evaluation"))
