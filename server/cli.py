"""The command line for people, and the door through which clients start the server.

`serve` is looked for before anything else is imported: a client waits for it, and typer with rich behind it would cost
as much again as the server itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from server.roles import Role

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name."""
    if sys.argv[1:2] == ["serve"] and (role := _role(sys.argv[2:])) is not None:
        from server.app import serve_stdio

        serve_stdio(role)
        return
    from server.commands import build

    app: typer.Typer = build()
    app()


def _role(arguments: list[str]) -> Role | None:
    """What `serve` is to offer; None where the whole command line is needed to tell."""
    from server.roles import role_of_arguments
    from toprope.errors import InvalidValue

    try:
        return role_of_arguments(arguments)
    except InvalidValue:
        return None


if __name__ == "__main__":
    main()
