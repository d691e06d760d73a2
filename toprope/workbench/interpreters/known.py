"""Known interpreters: Toprope's own and those that the owner added."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toprope.workbench.interpreters.registry import Added


@dataclass(frozen=True)
class Known:
    """An interpreter as listing sees it."""

    name: str
    """Name given by the owner; empty for Toprope's own."""
    python: str | None
    """Path; None for Toprope's own."""
    site_packages: Path
    adapter: str | None = None
    """The ecosystem that it was made for; None if the owner named none."""

    @property
    def problem(self) -> str:
        """Reason why it cannot be used; empty if none is known."""
        if self.python is not None and not Path(self.python).exists():
            return f"Its interpreter {self.python} is gone."
        return "" if self.site_packages.is_dir() else f"Its packages in {self.site_packages} are gone."


def known_interpreters(added: Mapping[str, Added]) -> list[Known]:
    """Return Toprope's own interpreter, then those made for an ecosystem, then the rest, by name.

    An interpreter that several entries share appears once.
    """
    ours = [Known("", None, Path(sysconfig.get_path("purelib")))]
    theirs = [
        Known(addition.name, addition.python, Path(addition.site_packages), addition.adapter)
        for addition in added.values()
        if addition.python and addition.site_packages
    ]
    theirs.sort(key=lambda known: (known.name != known.adapter, known.adapter is None, known.name))
    first: dict[Path, Known] = {}
    for interpreter in theirs:
        first.setdefault(interpreter.site_packages, interpreter)
    return [*ours, *first.values()]
