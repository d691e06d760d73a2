"""What a server lets its client do: all of it, reading alone, or some sets of tools. Chosen at its start, never after.

A role is given on the command line, in the client's configuration therefore, and by the owner for every server, in
settings.yaml (`serve: {read_only: true, tools: [plan, read]}`). The narrower counts, and read-only beats any set. The
list of tools is as fixed as without: a client that reads it once knows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toprope.errors import InvalidValue, TopropeError

if TYPE_CHECKING:
    from mcp.server.mcpserver.tools import Tool

    from toprope.settings.owner import OwnerSettings

__all__ = ["SETS", "Role", "owners_role", "role_of_arguments", "role_of_settings"]

SETS = {
    "plan": "environments, drafts and the notes of experiments",
    "run": "measuring, starting, stopping, resuming and asking",
    "read": "everything that changes nothing",
}
_PLANS = ("drafts", "experiments", "environments_install")
_SAYS_SERVE = re.compile(r"^\s*[\"']?(serve|installs)[\"']?\s*:", re.MULTILINE)
_INSTALLS = "add_environment"
"""The tool that is offered only where the owner lets agents install."""


@dataclass(frozen=True)
class Role:
    """What a server offers. `sets` None: all of them; `why`: what a client is told of a role that nobody chose;
    `installs`: whether agents may install, which the owner's settings alone can say."""

    read_only: bool = False
    sets: frozenset[str] | None = None
    why: str = ""
    installs: bool = False

    @classmethod
    def of(cls, read_only: bool = False, sets: str | Sequence[str] | None = None) -> Role:
        """The role of options as they are given: sets as a list, or a text with commas.

        Raises:
            InvalidValue: A set is none.
        """
        names = sets.split(",") if isinstance(sets, str) else list(sets or ())
        chosen = frozenset(name.strip().lower() for name in names if name.strip())
        if unknown := sorted(chosen - SETS.keys()):
            said = "; ".join(f"{name}: {what}" for name, what in SETS.items())
            raise InvalidValue(f"There is no set of tools {', '.join(unknown)}.", hint=f"There are {said}.")
        if isinstance(sets, str) and not chosen:
            raise InvalidValue("No set of tools is named.", hint=f"There are {', '.join(SETS)}; omit it for all.")
        return cls(read_only, chosen or None)

    def within(self, other: Role) -> Role:
        """The narrower of two: what both allow."""
        both = self.sets if other.sets is None else other.sets if self.sets is None else self.sets & other.sets
        installs = self.installs or other.installs
        return replace(
            self, read_only=self.read_only or other.read_only, sets=both, why=self.why or other.why, installs=installs
        )

    def allows(self, tool: Tool) -> bool:
        """Whether the tool is offered."""
        reads = bool(tool.annotations and tool.annotations.read_only_hint)
        if self.read_only:
            return reads
        if tool.name == _INSTALLS and not self.installs:
            return False
        if self.sets is None:
            return True
        part = tool.fn.__module__.rpartition(".")[2]
        own = {"plan" if part in _PLANS else "run"} if part in (*_PLANS, "runs") or not reads else set()
        return bool(self.sets & (own | ({"read"} if reads else set())))

    @property
    def says(self) -> str:
        """What stands before the instructions; empty where nothing is left out."""
        if self.read_only:
            text = "This server is read-only: it shows environments, drafts and runs, and changes nothing."
        elif self.sets is not None:
            text = f"This server has the tools to {', '.join(name for name in SETS if name in self.sets)} only."
        else:
            return ""
        return f"{text} {self.why}".strip() + " The owner decides that when it starts.\n\n"

    @property
    def arguments(self) -> list[str]:
        """The same on a command line."""
        sets = ["--tools", ",".join(name for name in SETS if name in self.sets)] if self.sets else []
        return [*(["--read-only"] if self.read_only else []), *sets]


def role_of_arguments(arguments: Sequence[str]) -> Role | None:
    """The role in the arguments of `serve`; None where there are others, which need the whole command line.

    Raises:
        InvalidValue: A set is none.
    """
    read_only, sets, left = False, None, list(arguments)
    while left:
        word = left.pop(0)
        if word == "--read-only":
            read_only = True
        elif word == "--tools" and left:
            sets = left.pop(0)
        elif word.startswith("--tools="):
            sets = word.removeprefix("--tools=")
        else:
            return None
    return Role.of(read_only, sets)


def role_of_settings(settings: OwnerSettings) -> Role:
    """The role that the owner's settings give every server.

    Raises:
        InvalidValue: A set of tools is none.
    """
    role = Role.of(settings.serve.read_only, settings.serve.tools)
    return replace(role, installs=settings.installs == "allow")


def owners_role() -> Role:
    """The owner's role for every server. Settings that cannot be read allow reading alone, and say why.

    Clients wait for a server's start, so the file is looked into, and read only where it speaks of this.
    """
    named = os.environ.get("TOPROPE_CONFIG")
    if named:
        folder = Path(named).expanduser()
    else:
        import platformdirs

        folder = platformdirs.user_config_path("toprope", appauthor=False)
    try:
        text = (folder / "settings.yaml").read_text(encoding="utf-8")
    except FileNotFoundError:
        return Role()
    except (OSError, ValueError) as error:
        return Role(read_only=True, why=f"settings.yaml cannot be read: {error}.")
    if not _SAYS_SERVE.search(text):
        return Role()
    from toprope.settings.owner import Home

    try:
        return role_of_settings(Home.locate().settings())
    except TopropeError as error:
        return Role(read_only=True, why=f"{error.message}")
