"""`toprope env ...`: the commands about environments. Each has a module of its own."""

from __future__ import annotations

import typer

from server.env_check import check
from server.env_manage import add, listed, remove

__all__ = ["build"]


def build() -> typer.Typer:
    """The group."""
    app = typer.Typer(name="env", help="Look after environments.", no_args_is_help=True)
    for command in (add, remove, check):
        app.command()(command)
    app.command("list")(listed)
    return app
