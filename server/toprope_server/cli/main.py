"""Entry point of the command line, for people and for clients that start the server.

`serve` is handled before anything else is imported: a client waits for it, and typer with rich would take as long to
import as the server itself.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from toprope_server.mcp.roles import Role


def main() -> None:
    """Run the command that the arguments name."""
    if sys.platform == "win32":
        sys.exit("toprope: Windows itself cannot hold a run's processes. Install Toprope in WSL; nothing was changed.")
    os.umask(0o077)  # others on the machine read nothing that Toprope writes
    if sys.argv[1:2] == ["serve"] and (role := _role(sys.argv[2:])) is not None:
        from toprope.extras import without_collector
        from toprope.sdk.wall.kernel import hide_memory

        with without_collector():
            from toprope_server.mcp.app import serve_stdio

        hide_memory()
        serve_stdio(role)
        return
    from toprope_server.cli.app import build
    from toprope_server.cli.rope import recorded

    app: typer.Typer = build()
    with recorded(sys.argv[1:]):
        app()


def _role(arguments: list[str]) -> Role | None:
    """The role for `serve`; None if the arguments need the full command line."""
    from toprope.errors import InvalidValue
    from toprope_server.mcp.roles import role_of_arguments

    try:
        return role_of_arguments(arguments)
    except InvalidValue:
        return None
