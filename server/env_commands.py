"""`toprope env ...`: the commands about environments. Each has a module of its own."""

from __future__ import annotations

import typer

from server.env_check import check
from server.env_manage import add, listed, remove
from server.env_new import new
from server.env_try import play

__all__ = ["build"]


def build() -> typer.Typer:
    """The group."""
    app = typer.Typer(name="env", help="Look after environments.", no_args_is_help=True)
    for command in (new, check, add, remove):
        app.command()(command)
    app.command("try")(play)
    app.command("list")(listed)
    return app
