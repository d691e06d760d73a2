"""`toprope doctor --repair`: rebuild a damaged index of drafts. The damaged file is kept.

Nothing else needs a repair: the next command that reads a run repairs it, and the owner's files are the owner's.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

import typer

from toprope.errors import Corrupt, NotPossibleNow
from toprope.records.index.database import Index
from toprope.records.index.rebuild import RebuiltIndex, move_aside, rebuild_index
from toprope.settings.owner import Home

_NAMED = 20


def problem_of(home: Home) -> str | None:
    """A sentence on the damage to the index; None if it is intact or missing.

    Raises:
        NotPossibleNow: It belongs to a newer version, or stays locked; it is not damaged.
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
        problems = [str(error)]
    return f"{home.index} is damaged: {'; '.join(problems)}" if problems else None


def main(home: Home | None = None) -> int:
    """Rebuild the index if it is damaged, print the outcome, and return the exit status."""
    home = home or Home.locate()
    try:
        problem = problem_of(home)
    except NotPossibleNow as error:
        typer.echo(f"The index is not damaged, and is unchanged: {error}")
        return 1
    if problem is None and home.index.exists():
        typer.echo("The index is intact: nothing was changed.")
        return 0
    if problem is None and not home.runs.is_dir():
        typer.echo("There is no index and there are no runs: there is nothing to repair.")
        return 0
    aside = None
    try:
        if problem is not None:
            aside = move_aside(home.index)
            typer.echo(f"{problem}\nIt is kept as {aside}.")
        rebuilt = rebuild_index(Index(home.index), home.runs, aside)
    except OSError as error:
        typer.echo(f"Cannot rebuild the index: {error.strerror or error}.")
        return 1
    _report(home, rebuilt)
    return 0


def _report(home: Home, rebuilt: RebuiltIndex) -> None:
    typer.echo(f"A new index was made at {home.index}: {rebuilt.starts} starts of runs.")
    if rebuilt.kept:
        typer.echo(f"Drafts kept with their history: {len(rebuilt.kept)}.")
    if rebuilt.remade:
        typer.echo(f"Drafts restored from their newest run, without their history: {len(rebuilt.remade)}.")
        for draft_id, run_id in list(rebuilt.remade.items())[:_NAMED]:
            typer.echo(f"  {draft_id}, as {run_id} was started")
    if rebuilt.unreadable:
        typer.echo(f"Skipped runs with an unreadable specification: {', '.join(rebuilt.unreadable[:_NAMED])}")
    typer.echo("Unreadable drafts that no run was started from are lost.")
