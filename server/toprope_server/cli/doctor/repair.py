"""`toprope doctor --repair`: what can be mended without the owner, is. Nothing damaged is overwritten or deleted.

It mends the index alone: runs mend themselves when somebody looks at them, and the owner's own files are the owner's.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

import typer

from toprope.errors import Corrupt, NotPossibleNow
from toprope.records.index.database import Index
from toprope.records.index.rebuild import RebuiltIndex, move_aside, rebuild_index
from toprope.settings.owner import Home

__all__ = ["main", "problem_of"]

_NAMED = 20


def problem_of(home: Home) -> str | None:
    """What is wrong with the index, in SQLite's or our words; None where it is sound, or there is none.

    Raises:
        NotPossibleNow: It belongs to a newer version, or stays locked: it is not damaged.
    """
    if not home.index.exists():
        return None
    try:
        Index(home.index).drafts(limit=1)
        with closing(sqlite3.connect(f"{home.index.resolve().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            problems = [row[0] for row in db.execute("PRAGMA integrity_check(3)") if row[0] != "ok"]
    except Corrupt as error:
        return error.message
    except sqlite3.Error as error:
        return str(error)
    return "; ".join(problems) or None


def main(home: Home | None = None) -> int:
    """Mends the index where it is damaged, says what became of it, and returns the exit status."""
    home = home or Home.locate()
    try:
        problem = problem_of(home)
    except NotPossibleNow as error:
        typer.echo(f"The index is not damaged, and was left as it is: {error}")
        return 1
    if problem is None and home.index.exists():
        typer.echo("The index is sound: nothing was changed.")
        return 0
    if problem is None and not home.runs.is_dir():
        typer.echo("There is no index and there are no runs: nothing is to be repaired.")
        return 0
    aside = None
    try:
        if problem is not None:
            aside = move_aside(home.index)
            typer.echo(f"The index was damaged: {problem}\nIt is kept as {aside}.")
        told = rebuild_index(Index(home.index), home.runs, aside)
    except OSError as error:
        typer.echo(f"The index could not be mended: {error.strerror or error}.")
        return 1
    _say(home, told)
    return 0


def _say(home: Home, told: RebuiltIndex) -> None:
    typer.echo(f"A new index was made at {home.index}: {told.starts} starts of runs.")
    if told.kept:
        typer.echo(f"Drafts kept with their history: {len(told.kept)}.")
    if told.remade:
        typer.echo(f"Drafts made again of their newest run, without their history: {len(told.remade)}.")
        for draft_id, run_id in list(told.remade.items())[:_NAMED]:
            typer.echo(f"  {draft_id}, as {run_id} was started")
    if told.unreadable:
        typer.echo(f"Runs whose specification cannot be read were passed over: {', '.join(told.unreadable[:_NAMED])}")
    typer.echo("Drafts that no run was started from and that could not be read are lost.")
