"""List tasksets of verifiers from files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import first_line, literal, parse

__all__ = ["declared", "installed"]

_PACKAGE = "verifiers"


def installed(site_packages: Path) -> list[Listed]:
    """List tasksets of installed packages that require verifiers."""
    found = []
    for metadata in sorted(site_packages.glob("*.dist-info/METADATA")):
        try:
            text = metadata.read_text(errors="replace").partition("\n\n")[0]
            if "\nRequires-Dist: verifiers" not in text:
                continue
            record = metadata.with_name("RECORD").read_text(errors="replace")
        except OSError:
            continue
        summary = next((line[9:] for line in text.splitlines() if line.startswith("Summary: ")), "")
        files = [line.partition(",")[0] for line in record.splitlines()]
        for name in files:
            parts = name.split("/")
            if not (len(parts) == 1 and name.endswith(".py") or len(parts) == 2 and parts[1] == "__init__.py"):
                continue
            if listed := _listed(site_packages / name, name.removesuffix("/__init__.py").removesuffix(".py"), summary):
                found.append(listed)
    return found


def _listed(file: Path, module: str, summary: str) -> Listed | None:
    try:
        tree = parse(file)
    except (OSError, SyntaxError, ValueError):
        return None
    description = first_line(ast.get_docstring(tree)) or summary
    exported = next(
        (
            literal(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and _named(node.targets[0], "__all__")
        ),
        None,
    )
    names = [str(name) for name in exported] if isinstance(exported, list | tuple) else []
    if any(name.endswith("Taskset") for name in names) or any(node.name in names for node in _tasksets(tree)):
        return Listed(module, module, description, tags=("verifiers",))
    if any(isinstance(node, ast.FunctionDef) and node.name == "load_environment" for node in tree.body):
        problem = "It is written for verifiers before 0.4 (load_environment); 0.4 needs a taskset."
        return Listed(module, module, description, tags=("verifiers",), problem=problem)
    return None


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List tasksets in a user's file."""
    found = list(_tasksets(tree))
    return [
        Listed(
            name=file.stem if len(found) == 1 else f"{file.stem}_{node.name.lower()}",
            target=f"{file}:{node.name}",
            description=first_line(ast.get_docstring(node)) or first_line(ast.get_docstring(tree)),
            tags=("verifiers",),
        )
        for node in found
    ]


def _tasksets(tree: ast.Module) -> Iterator[ast.ClassDef]:
    modules, names = set(), set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name for one in node.names if one.name.split(".")[0] == _PACKAGE}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            names |= {one.asname or one.name for one in node.names if one.name == "Taskset"}
            modules |= {one.asname or one.name for one in node.names if one.name == "v1"}
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


def _named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
