"""`toprope env check`: whether an environment is fit to train on, for people."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

__all__ = ["check"]


def check(
    name: Annotated[str, typer.Argument(help="An environment's name, or a draft's id: then with its settings.")],
    full: Annotated[bool, typer.Option("--full", help="Look at more of everything, and at memory.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=3600, help="How long it may take. Default: 25, with --full 45.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Try whether an environment can teach: what its scorer makes of right and wrong answers, leaks, chance, time.

    Exit status 1 if something has to be mended before training on it.
    """
    from toprope_tools.planning.environment_check import check_environment
    from toprope_tools.workshop import Workshop

    from toprope.errors import TopropeError

    try:
        workshop = Workshop.open()
        answer = anyio.run(lambda: check_environment(workshop, name=name, full=full, seconds=seconds))
    except TopropeError as error:
        typer.echo(f"toprope: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(answer.data.model_dump_json(indent=1))
    else:
        typer.echo("\n".join(answer.text.split("\n")[:-1]))  # without an agent's next call
    raise typer.Exit(1 if answer.data.model_dump()["verdict"] == "critical" else 0)
