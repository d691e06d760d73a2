"""`toprope data ...`: rollouts as files, named data sets, and traces from outside, for people.

What `data` in settings.yaml forbids holds here as well: the file says what holds on this machine.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from toprope.trajectories.jobs.jobs import Job
    from toprope.workbench.data import DataOrder

__all__ = ["build"]

Where = Annotated[
    list[str] | None,
    typer.Option("--where", "-w", metavar="NAME=VALUE", help="A filter, such as success=true; repeatable."),
]
_EVERY_S = 0.5


def build() -> typer.Typer:
    """The group."""
    app = typer.Typer(name="data", help="Export rollouts, build data sets, take in traces.", no_args_is_help=True)
    app.command("export")(export)
    app.command("build")(make)
    app.command("import")(take_in)
    app.command("list")(listed)
    app.command("show")(show)
    app.command("stop")(stop)
    return app


def export(
    sources: Annotated[list[str], typer.Argument(help="Runs, seed groups, or data sets (best@v1).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to; its ending says the format. Default: a file in the home."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", "-f", help="jsonl, json, csv, parquet, or datasets (a folder).")
    ] = None,
    where: Where = None,
) -> None:
    """Write rollouts as state, action, reward and metadata. Held-out tasks are sealed and in no file."""
    from toprope.trajectories.datasets.writers import ENDINGS
    from toprope.workbench.data import export_order
    from toprope_server.cli.commands import open_workshop

    with open_workshop() as workshop:
        endings = {ending: name for name, ending in ENDINGS.items() if ending}
        chosen = form or (endings.get(output.suffix, "datasets") if output is not None else "jsonl")
        target = None if output is None else output.expanduser().absolute()
        home = workshop.home.ensure()
        outcome = _follow(home, export_order(home, sources, chosen, filters(where), target=target))
        typer.echo(f"{outcome.items} items ({outcome.bytes} bytes) in {outcome.path}")
        _tell(outcome)


def make(
    name: Annotated[str, typer.Argument(help="Of the data set; this becomes its next version.")],
    sources: Annotated[list[str] | None, typer.Argument(help="Runs, seed groups, data sets, or NAME@inbox.")] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", "-r", help="A YAML file: steps, target_size, split; docs/data.md.")
    ] = None,
    file: Annotated[list[Path] | None, typer.Option("--file", help="JSON lines to read besides; repeatable.")] = None,
    where: Where = None,
) -> None:
    """Build the next version of a data set from rollouts, other data sets, files, and generated items."""
    from toprope.settings.yamlfiles import read_yaml
    from toprope.workbench.data import build_order
    from toprope_server.cli.commands import open_workshop

    with open_workshop() as workshop:
        home, given = workshop.home.ensure(), {} if recipe is None else read_yaml(recipe)
        files = [_there(path) for path in file or ()]
        order = build_order(
            home, workshop.catalog, name, sources or [], filters(where), given, anywhere=True, files=files
        )
        outcome = _follow(home, order)
        new = "" if outcome.new else " (unchanged)"
        typer.echo(f"{outcome.version}{new}: {outcome.items} items in {outcome.path}")
        for split, count in outcome.splits.items():
            typer.echo(f"  {split}: {count}")
        _tell(outcome)


def take_in(
    name: Annotated[str, typer.Argument(help="Of the data set that they are for.")],
    file: Annotated[Path, typer.Argument(help="JSON lines: items, or {messages, reward}; '-': standard input.")],
) -> None:
    """Take traces of an agent framework in, for the next version: 'toprope data build NAME NAME@inbox'."""
    import sys

    from toprope.workbench.data import inbox_of
    from toprope_server.cli.commands import open_workshop

    with open_workshop() as workshop:
        inbox = inbox_of(workshop.home, name)
        with sys.stdin.buffer if str(file) == "-" else _there(file).open("rb") as lines:
            taken = inbox.take(lines, "standard input" if str(file) == "-" else file.name)
        typer.echo(f"{taken} items wait for {name}: toprope data build {name} {name}@inbox")


def _there(path: Path) -> Path:
    """A file that was named and can be read, by its whole path.

    Raises:
        InvalidValue: There is none; nothing was changed.
    """
    from toprope.errors import InvalidValue

    found = path.expanduser().absolute()
    if not found.is_file() or not os.access(found, os.R_OK):
        wrong = "is not there" if not found.exists() else "is no file that can be read"
        raise InvalidValue(f"{found} {wrong}. Nothing was changed.", hint="Name a file of JSON lines.")
    return found


def listed() -> None:
    """List the data sets with their versions, and what is being made."""
    from toprope.trajectories.datasets.store import DatasetStore
    from toprope.workbench.data import live_jobs
    from toprope_server.cli.commands import open_workshop

    with open_workshop() as workshop:
        store = DatasetStore(workshop.home.datasets)
        for name in store.names():
            for version in store.versions(name):
                record = store.find(f"{name}@{version}").record
                typer.echo(
                    f"{name}@{version}  {record.items} items  {record.digest[:12]}  {record.description}".rstrip()
                )
            if store.inbox(name).is_file():
                typer.echo(f"{name}@inbox  posted from outside, in no version yet")
        if not store.names():
            typer.echo(f"There are no data sets in {store.path}.")
        for job in live_jobs(workshop.home):
            now = job.standing()
            typer.echo(f"going on: {job.id}  {now.doing}, {now.read} read, {now.kept} kept")


def show(name: Annotated[str, typer.Argument(help="best, or best@v2.")]) -> None:
    """Print the card of a data set: what it holds, and what it is made of."""
    from toprope.trajectories.datasets.store import DatasetStore
    from toprope_server.cli.commands import open_workshop

    with open_workshop() as workshop:
        version = DatasetStore(workshop.home.datasets).find(name)
        version.require_sound()
        typer.echo(version.card.read_text(encoding="utf-8"))


def stop(job: Annotated[str, typer.Argument(help="As 'toprope data list' shows it.")]) -> None:
    """Stop an export or a build that goes on; the same command takes a build up where it was."""
    from toprope.errors import NotFound
    from toprope.workbench.data import live_jobs
    from toprope_server.cli.commands import open_workshop

    with open_workshop() as workshop:
        found = next((one for one in live_jobs(workshop.home) if one.id == job), None)
        if found is None:
            raise NotFound(f"Nothing goes on under {job}.", hint="toprope data list shows what does.")
        found.stop()
        typer.echo(f"{job} is ending.")


def filters(where: list[str] | None) -> dict[str, Any]:
    """Filters of a command line: `success=true`, `min_reward=0.5`, `task=abc`."""
    found: dict[str, Any] = {}
    for written in where or ():
        name, sign, value = written.partition("=")
        if not sign:
            raise typer.BadParameter(f"{written} is not of the form NAME=VALUE.")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
        if name.strip() in ("run", "environment", "task", "split"):
            found[name.strip()] = value
    return found


def _follow(home: Any, order: DataOrder) -> Any:
    """Waits for the end of an order, saying now and then how it stands."""
    from toprope.workbench.data import begin

    job: Job = begin(home, order)
    told = time.monotonic()
    try:
        while not (now := job.standing()).ended:
            time.sleep(_EVERY_S / 10 if time.monotonic() - told < _EVERY_S else _EVERY_S)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                typer.echo(f"{now.doing}: {now.read} read, {now.kept} kept", err=True)
    except KeyboardInterrupt:
        job.stop()
        raise
    job.tell()
    if now.failure is not None:
        raise now.failure
    return now.outcome


def _tell(outcome: Any) -> None:
    if outcome.left_out:
        said = ", ".join(f"{count} {why}" for why, count in outcome.left_out.items())
        typer.echo(f"left out of {outcome.read + outcome.generated}: {said}")
    for warning in outcome.warnings:
        typer.echo(warning, err=True)
