"""Resources servers of NeMo Gym in folders and packages: how they are found, and how they are started."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import first_line, parse

__all__ = ["command", "declared", "installed", "rows_beside"]

_SERVE = str(Path(__file__).with_name("nemo_gym_serve.py"))
_BASES = ("SimpleResourcesServer", "GymnasiumServer")
_PARENT = "resources_servers"
_RESULTS = re.compile(r"rollouts|metrics|profiling|prepare|materialized")
"""In names of data files that are no tasks."""
_NOT_TEXT = re.compile(r'"type": ?"(?:input_image|image_url|input_audio|audio_url)"')
_LOOKED_AT = 1 << 20
_DESCRIPTION = re.compile(r"^ +description: *(.+)$", re.MULTILINE)


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List the server of an `app.py` that derives from one of NeMo Gym's, with the rows in its folder `data`."""
    if file.name != "app.py" or not any(isinstance(one, ast.ClassDef) and _is_server(one, tree) for one in tree.body):
        return []
    folder, rows = file.parent, rows_beside(file.parent)
    packages = [str(one) for one in (folder.parent, folder.parent.parent / "nemo_gym") if one.is_dir()]
    if folder.parent.name != _PARENT:
        packages = []
    target = {"folder": str(folder), "packages": packages, "rows": [str(one) for one in rows], "name": folder.name}
    said = [found[1] for one in sorted(folder.glob("configs/*.yaml")) if (found := _DESCRIPTION.search(_text(one)))]
    text = said[0].strip("'\"") if said else first_line(ast.get_docstring(tree))
    problem = "" if rows else f"{folder / 'data'} has no rows (JSON lines with responses_create_params)."
    if rows and _NOT_TEXT.search(_text(rows[0])[:_LOOKED_AT]):
        problem = "Its rows have images or sound; policies here read text alone. Choose another environment."
    return [Listed(folder.name, json.dumps(target, sort_keys=True), text, tags=("nemo-gym",), problem=problem)]


def installed(site_packages: Path) -> list[Listed]:
    """List the servers that come with the package."""
    found = []
    for file in sorted(site_packages.glob(f"{_PARENT}/*/app.py")):
        try:
            found += declared(file, parse(file))
        except (OSError, SyntaxError, ValueError):
            continue
    return found


def command(folder: str, packages: list[str]) -> tuple[str, ...]:
    """Return the words that start the server of a folder; see `nemo_gym_serve.py`."""
    return ("{python}", "-P", _SERVE, folder, "{port}", *packages)


def rows_beside(folder: Path) -> list[Path]:
    """Return the files of a server's tasks: those for training, or else its examples, or else all."""
    files = [one for one in sorted(folder.glob("data/*.jsonl")) if not _RESULTS.search(one.name)]
    for name in ("train", "example"):
        if chosen := [one for one in files if one.stem == name]:
            return chosen
    return files


def _is_server(node: ast.ClassDef, tree: ast.Module) -> bool:
    bases = {ast.unparse(one).rpartition(".")[2] for one in node.bases}
    theirs = {
        one.asname or one.name
        for each in tree.body
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith((f"{_PARENT}.", "nemo_gym."))
        for one in each.names
    }
    return any(one in _BASES or one in theirs and one.endswith(("Server", "Env")) for one in bases)


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
