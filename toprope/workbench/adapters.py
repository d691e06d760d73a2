"""What the adapters offer for listing, each looked at by itself: one that is broken says so and hides no other.

An adapter is a file of toprope/sdk/adapters whose name does not begin with `_`; `_listing.py` there says what it may
hold. They are imported at the first listing, which costs little: at import they are standard library only.
"""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import first_line

__all__ = ["WITH_SOURCES_OF_THEIR_OWN", "Adapter", "adapters"]

WITH_SOURCES_OF_THEIR_OWN = ("dataset", "orchestrator", "reasoning_gym")
"""Adapters that a source of the catalog lists by itself."""

_FOLDER = Path(importlib.import_module("toprope.sdk.adapters").__path__[0])


@dataclass(frozen=True)
class Adapter:
    """One adapter as listing sees it."""

    name: str
    description: str
    package: str = ""
    """What must be importable in an interpreter; empty: nothing beyond the standard library."""
    requirements: tuple[str, ...] = ()
    """What an interpreter of its own is made of; empty: none is needed."""
    problem: str = ""
    """Why the adapter itself cannot be used."""
    module: ModuleType | None = None

    @property
    def lists_packages(self) -> bool:
        """Whether it can tell what an interpreter's packages hold."""
        return self.name not in WITH_SOURCES_OF_THEIR_OWN and callable(getattr(self.module, "installed", None))

    @property
    def reads_files(self) -> bool:
        """Whether it can tell what a user's file declares."""
        return self.name not in WITH_SOURCES_OF_THEIR_OWN and callable(getattr(self.module, "declared", None))

    def installed(self, site_packages: Path) -> list[Listed]:
        """What the packages of an interpreter hold. Raises whatever the adapter does."""
        return _listed(self.module.installed(site_packages)) if self.module is not None and self.lists_packages else []

    def declared(self, file: Path, tree: ast.Module) -> list[Listed]:
        """What a file declares. Raises whatever the adapter does."""
        return _listed(self.module.declared(file, tree)) if self.module is not None and self.reads_files else []

    def is_in(self, site_packages: Path) -> bool:
        """Whether an interpreter with these packages can run its environments."""
        if not self.package:
            return True
        place = site_packages / Path(*self.package.split("."))
        if place.is_dir() or place.with_suffix(".py").is_file():
            return True
        word = self.package.replace("_", "-").lower()
        try:
            names = os.listdir(site_packages)
        except OSError:
            return False
        return any(  # installed from a folder: there is nothing but the note of it
            name.endswith(".dist-info")
            and name.rpartition("-")[0].rpartition("-")[0].replace("_", "-").lower() == word
            and (site_packages / name / "direct_url.json").is_file()
            for name in names
        )


def adapters(folder: Path = _FOLDER, load: Callable[[str], ModuleType] | None = None) -> list[Adapter]:
    """All adapters by name.

    Args:
        folder: Where they lie.
        load: Imports one by its name; our own package by default.
    """
    load = load or (lambda name: importlib.import_module(f"toprope.sdk.adapters.{name}"))
    found = []
    for file in sorted(folder.glob("[a-z]*.py")):
        try:
            module = load(file.stem)
            found.append(
                Adapter(
                    name=file.stem,
                    description=first_line(module.__doc__),
                    package=str(getattr(module, "PACKAGE", "") or ""),
                    requirements=_texts(getattr(module, "REQUIREMENTS", ())),
                    module=module,
                )
            )
        except Exception as error:  # a half-written adapter must not take the others along
            found.append(Adapter(file.stem, "", problem=f"{type(error).__name__}: {error} ({file})"))
    return found


def _listed(given: Any) -> list[Listed]:
    return [one for one in given if isinstance(one, Listed)]


def _texts(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(map(str, given)) if isinstance(given, Sequence) else ()
