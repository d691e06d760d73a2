"""Listing of an ecosystem's environments from files, without importing it.

An adapter module declares:

    REQUIREMENTS = ("verifiers==0.4.*",)      pip requirements of a separate interpreter
    PACKAGE = "verifiers"                     package that must be importable there

    def installed(site_packages: Path) -> list[Listed]      environments in installed packages
    def declared(file: Path, tree: ast.Module) -> list[Listed]      environments in a user's file

Both functions are optional. They run in the server, read files only, and import nothing of the ecosystem.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Listed"]


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
