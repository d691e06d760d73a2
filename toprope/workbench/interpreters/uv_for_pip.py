"""uv in pip's place, for one installation: it takes what a project overrides, which pip does not.

uv reads no settings of pip (https://pip.pypa.io/en/stable/topics/configuration), so it is told those by which pip finds
packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from toprope.workbench.interpreters.processes import Commands

__all__ = ["fetched_uv", "told_uv"]

_OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
}


def fetched_uv(pip: Sequence[str], place: Path, commands: Commands) -> list[str] | None:
    """Install uv into a folder of its own and return its path, and the options for pip's sources; None if it cannot be
    had.

    Args:
        pip: argv of pip before its command.
    """
    command = [*pip, "install", "--no-deps", "--only-binary=:all:", f"--target={place}", "uv>=0.9,<1"]
    code, _ = commands.run(command, place.parent)
    program = place / "bin" / "uv"
    if code or not program.is_file():
        return None
    code, lines = commands.run([*pip, "config", "list"], place.parent)
    return [str(program), *told_uv([] if code else lines)]


def told_uv(lines: Iterable[str]) -> list[str]:
    """Return options of uv from the lines of `pip config list`; a variable precedes a file's setting."""
    found: dict[str, str] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        scope, _, key = name.rpartition(".")
        if scope not in ("global", "install", ":env:") or key not in _OPTIONS:
            continue
        try:
            found[key] = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue
    told = [f"{_OPTIONS[key]}={one}" for key, value in found.items() for one in value.split()]
    return [*told, "--index-strategy=unsafe-best-match"] if told else []  # like pip
