"""Folders inside the owner's folders with environments: their YAML files, and the names of what is found there.

A name depends on the file's own place alone, so that other files never change it: `games/chess.py` is `games-chess`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from toprope.sdk.discovery import folders_below, name_of, subfolders

_ADAPTER = re.compile(rb"""^adapter[ \t]*:[ \t]*["']?([a-z_]+)""", re.MULTILINE)
_HEAD = 1 << 16
"""Bytes of a YAML file in which its adapter is searched."""


def placed_name(root: Path, file: Path, name: str) -> str:
    """Return the name of an environment: its own after the folders from the owner's folder to its file.

    Args:
        root: The owner's folder.
        file: A file or folder below it.
        name: Its own name. If that begins with the folder's, the folder is left out.
    """
    above = list(file.relative_to(root).parts[:-1])
    if above and re.match(rf"{re.escape(above[-1])}(?![a-z0-9])", name, re.IGNORECASE):
        above.pop()
    return name_of("-".join([*above, name]))


def is_apart(place: Path, root: Path, apart: Collection[Path]) -> bool:
    """Return True if a file or folder below `root` is one of these folders or in one of them that is below `root`."""
    between = [place, *place.parents][: len(place.relative_to(root).parts)]
    return any(one in apart for one in between)


def yaml_files(place: Path, adapters: Collection[str], apart: Collection[Path] = ()) -> list[tuple[Path, str]]:
    """Return the YAML files that may declare environments, with their names, by folder and file name.

    Args:
        place: One of the owner's folders, all of whose own files count; or a file.
        adapters: Files in the folders below count if they name one of these.
        apart: Folders that other sources list.
    """
    if place.is_file():
        return [(place, place.stem)]
    found = [(file, file.stem) for file in yaml_in(place)]
    for child in subfolders(place):
        for folder in folders_below(child):
            if not is_apart(folder, place, apart):
                files = [file for file in yaml_in(folder) if _adapter_in(file) in adapters]
                found += [(file, placed_name(place, file, file.stem)) for file in files]
    return found


def yaml_in(folder: Path) -> list[Path]:
    """Return the YAML files of a folder that may declare environments."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    return [file for file in files if file.is_file() and not file.name.startswith("_")]


def _adapter_in(file: Path) -> str:
    """Return the adapter that a YAML file seems to name; empty if there is none. Others' files may be of any size."""
    try:
        with file.open("rb") as opened:
            found = _ADAPTER.search(opened.read(_HEAD))
    except OSError:
        return ""
    return "" if found is None else found[1].decode()
