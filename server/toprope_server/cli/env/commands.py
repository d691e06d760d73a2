"""`toprope env ...`: the commands about environments. Each has a module of its own."""

from __future__ import annotations

import typer

from toprope_server.cli.env.check import check
from toprope_server.cli.env.manage import add, listed, remove
from toprope_server.cli.env.new import new
from toprope_server.cli.env.trial import play

__all__ = ["build"]


def build() -> typer.Typer:
    """The group."""
    app = typer.Typer(name="env", help="Look after environments.", no_args_is_help=True)
    for command in (new, check, add, remove):
        app.command()(command)
    app.command("try")(play)
    app.command("list")(listed)
    return app
