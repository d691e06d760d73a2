"""The command line for people, and the door through which clients start the server.

`serve` is looked for before anything else is imported: a client waits for it, and typer with rich behind it would cost
as much again as the server itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name."""
    if sys.argv[1:] == ["serve"]:
        from server.app import serve_stdio

        serve_stdio()
        return
    from server.commands import build

    app: typer.Typer = build()
    app()


if __name__ == "__main__":
    main()
