"""`toprope engine add`, `list`, `remove`: engines with an interpreter of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from toprope.text_format import plural
from toprope_server.cli.context import open_workshop
from toprope_server.cli.env.manage import Base, ExtraIndexes, FindLinks, Offline, Progress, wanted_packages


def add(
    name: Annotated[str, typer.Argument(help="The engine: vllm.")],
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="An interpreter that has it already; nothing is installed.")
    ] = None,
    base: Base = None,
    offline: Offline = False,
    find_links: FindLinks = None,
    extra_index_url: ExtraIndexes = None,
) -> None:
    """Install an engine into an interpreter of its own: several gigabytes, for the GPU if there is one.

    A failed installation leaves nothing behind and names the requirement.
    """
    from toprope.workbench.interpreters.engines import add_engine

    packages = wanted_packages(base, offline, find_links, extra_index_url)
    with open_workshop() as workshop:
        outcome = add_engine(workshop.home, name, python=python, wanted=packages, progress=Progress().show)
    interpreter = outcome.made
    size = (
        ""
        if interpreter is None
        else f" ({plural(len(interpreter.pins), 'package')}, {interpreter.bytes / 1e9:.1f} GB)"
    )
    typer.echo(f"{name}: {outcome.added.python}{size}. Runs use it with inference.engine {name}.")


def list_engines() -> None:
    """List the engines that runs can use."""
    from toprope.workbench.interpreters.engines import ENGINES, engines_of

    with open_workshop() as workshop:
        added = engines_of(workshop.home).read()
    typer.echo("embedded: ready\ntransformers: ready")
    for name in ENGINES:
        typer.echo(f"{name}: {added[name].python if name in added else f'toprope engine add {name} installs it'}")


def remove(name: Annotated[str, typer.Argument(help="As 'toprope engine list' shows it.")]) -> None:
    """Remove an engine, and its interpreter once no live run uses it."""
    from toprope.workbench.interpreters.engines import remove_engine

    with open_workshop() as workshop:
        remove_engine(workshop.home, name)
    typer.echo(f"Removed {name}.")
