"""Listing of an ecosystem's environments from files, without importing it.

An adapter module declares:

    REQUIREMENTS = ("verifiers==0.4.*",)      pip requirements of a separate interpreter
    PACKAGE = "verifiers"                     package that must be importable there
    PYTHON = ">=3.12"                         Python that it is better run by, if the machine has one
    URLS_ALONE = True                         servers by address need no such interpreter

    def installed(site_packages: Path) -> list[Listed]      environments in installed packages
    def declared(file: Path, tree: ast.Module) -> list[Listed]      environments in a user's file

    def more_requirements(place: Path) -> tuple[str, ...]   for a project, or an interpreter's packages, that need more

All functions are optional. They run in the server, read files only, and import nothing of the ecosystem.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

__all__ = ["Listed", "why_not"]


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
    tasks: int | None = None
    """Number of tasks; None if unknown from files."""
    tags: tuple[str, ...] = ()
    problem: str = ""
    """Known problem with its remedy; empty if none is known."""
    needs: str = ""
    """`install`, `network` or `key` if the problem is one of these."""


def why_not(error: BaseException) -> str:
    """Say in one line why a game does not start; for missing data of NLTK, with the command that fetches it."""
    text = str(error)
    if "nltk.download" in text or "NLTK" in text:
        found = re.findall(r"nltk\.download\('([\w]+)'\)", text)
        names = " ".join(dict.fromkeys(found)) or "words averaged_perceptron_tagger_eng"
        return f"it needs data of NLTK: {sys.executable} -m nltk.downloader {names}, once, with a network"
    return " ".join(text.split())[:300] or type(error).__name__
