"""`toprope approve`: what a person confirms of the starts that agents asked for."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from toprope_server.cli.context import reporting_errors


def approve(
    hash: Annotated[str | None, typer.Argument(help="The hash of the start, as the refusal names it.")] = None,
) -> None:
    """Approve a start that a person must confirm, once; without a hash list what waits."""
    with reporting_errors():
        from toprope.settings.owner import Home
        from toprope.text_format import duration
        from toprope.workbench.approvals import EXPIRES_S, Approvals

        approvals = Approvals(Home.locate())
        if hash is not None:
            found = approvals.approve(hash)
            typer.echo(f"Approved, for one start within {EXPIRES_S / 3600:.0f} h: {found.text}.")
            return
        waiting = approvals.pending()
        for one in waiting:
            state = "approved, not used yet" if one.approved else "waits"
            typer.echo(f"{one.hash}  {state}, {duration(max(0.0, time.time() - one.at))} ago: {one.text}")
        if not waiting:
            typer.echo("No start waits for approval.")
