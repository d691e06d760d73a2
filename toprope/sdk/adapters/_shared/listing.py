"""How an ecosystem's environments are listed without importing it: what an adapter reads out of files.

An adapter says where its ecosystem comes from and what of it there is:

    REQUIREMENTS = ("verifiers==0.4.*",)      what pip is given for an interpreter of its own
    PACKAGE = "verifiers"                     what must be importable there

    def installed(site_packages: Path) -> list[Listed]      what an interpreter's packages hold
    def declared(file: Path, tree: ast.Module) -> list[Listed]      what a user's file declares

Both functions are optional, read files alone and run in the server: they import nothing of the ecosystem's.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Listed"]


@dataclass(frozen=True)
class Listed:
    """An environment as files tell of it."""

    name: str
    """Within the ecosystem; the catalog puts the adapter's name and a slash before it where it comes from packages."""
    target: str
    """What the adapter's `make` is given."""
    description: str = ""
    turns: int | None = None
    """Most answers in a rollout; None where files do not tell."""
    tools: bool = False
    """Whether the policy gets tools."""
    tasks: int | None = None
    """How many there are, where files tell."""
    tags: tuple[str, ...] = ()
    problem: str = ""
    """Why it would not run, and what to do; empty where nothing is known against it."""
    needs: str = ""
    """`install`, `network` or `key`, where the problem is one of these."""
