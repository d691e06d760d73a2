"""The command line for people, and the door through which clients start the server.

`serve` is looked for before anything else is imported: a client waits for it, and typer with rich behind it would cost
as much again as the server itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from toprope_server.mcp.roles import Role

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name."""
    if sys.argv[1:2] == ["serve"] and (role := _role(sys.argv[2:])) is not None:
        from toprope_server.mcp.app import serve_stdio

        serve_stdio(role)
        return
    from toprope_server.cli.app import build

    app: typer.Typer = build()
    app()


def _role(arguments: list[str]) -> Role | None:
    """What `serve` is to offer; None where the whole command line is needed to tell."""
    from toprope.errors import InvalidValue
    from toprope_server.mcp.roles import role_of_arguments

    try:
        return role_of_arguments(arguments)
    except InvalidValue:
        return None
