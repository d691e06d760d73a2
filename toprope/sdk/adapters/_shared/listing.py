"""Listing of an ecosystem's environments from files, without importing it.

An adapter module declares:

    REQUIREMENTS = ("verifiers==0.4.*",)      pip requirements of a separate interpreter
    PACKAGE = "verifiers"                     package that must be importable there
    FORMER = ("verifiers_v0",)                packages of earlier versions that do as well
    OPTIONAL = ("datasets",)                  those of more_requirements that an owner's interpreter may lack
    FOR_STANDALONE = ("uvicorn",)             requirements of environments that do not need the package
    PYTHON = ">=3.12"                         Python that it is better run by, if the machine has one
    URLS_ALONE = True                         servers by address need no such interpreter

    def installed(site_packages: Path) -> list[Listed]      environments in installed packages
    def declared(file: Path, tree: ast.Module) -> list[Listed]      environments in a user's file
    def in_folder(folder: Path) -> list[Listed]             environments that a folder is as a whole

    def more_requirements(place: Path) -> tuple[str, ...]   for a project, or an interpreter's packages, that need more

All functions are optional. They run in the server, read files only, and import nothing of the ecosystem.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["Listed", "name_of_class", "why_not", "with_nltk_data"]

_Made = TypeVar("_Made")
_NLTK_DATA = re.compile(r"nltk\.download\('(\w+)'\)")
_NLTK_PIECES = 3


@dataclass(frozen=True)
class Listed:
    """An environment found in files."""

    name: str
    """Name within the ecosystem; for packages the catalog prefixes the adapter's name and a slash."""
    target: str
    """Argument of the adapter's `make`."""
    description: str = ""
    turns: int | None = None
    """Most answers in a rollout; None if unknown from files."""
    tools: bool = False
    """True if the policy gets tools."""
    tags: tuple[str, ...] = ()
    problem: str = ""
    """Known problem with its remedy; empty if none is known."""
    standalone: bool = False
    """True if it needs nothing of the ecosystem's package."""
    needs: str = ""
    """`install`, `network`, `download` (a network once) or `key` if the problem is one of these."""
    content: str = ""
    """Digest of the package that provides it, which tells packages with one module name apart; empty if unknown."""


def name_of_class(file: Path, name: str, *, alone: bool) -> str:
    """The name of a class's environment: of its file, or of the folder for a file with a name that says nothing."""
    plain = file.parent.name if file.stem in ("env", "environment") else file.stem
    return plain if alone else f"{plain}-{name.lower()}"


def with_nltk_data(make: Callable[[], _Made]) -> _Made:
    """Return what `make` makes, after fetching the data of NLTK that it lacks, if that is allowed."""
    for _ in range(_NLTK_PIECES):
        try:
            return make()
        except LookupError as error:
            names = _NLTK_DATA.findall(str(error))
            if not names:
                raise
            place = os.path.expanduser("~/nltk_data")  # NLTK would take one that only looks writable from behind a wall
            if not all(importlib.import_module("nltk").download(name, download_dir=place) for name in names):
                raise error from ConnectionError("NLTK did not download its data")  # it prints why
    return make()


def why_not(error: BaseException) -> str:
    """Say in one line why a game does not start; if data of NLTK are missing, which."""
    text = str(error)
    if "nltk.download" in text or "NLTK" in text:
        names = " ".join(dict.fromkeys(_NLTK_DATA.findall(text))) or "words averaged_perceptron_tagger_eng"
        return f"it needs data of NLTK ({names}), which the folder nltk_data in its HOME may have"
    return " ".join(text.split())[:300] or type(error).__name__
