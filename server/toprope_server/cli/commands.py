"""The commands for people. They show what is on disk at once: the status limit is for agents, not for the owner.

Each command is a few lines here; what needs more has a module of its own, imported when the command is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

import toprope
from toprope.errors import TopropeError
from toprope_server.cli.install import client_lines
from toprope_server.mcp.roles import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from toprope_tools.answers.base import Answer
    from toprope_tools.workshop import Workshop

__all__ = ["build", "open_workshop"]

ReadOnly = Annotated[bool, typer.Option("--read-only", help="Offer only tools that change nothing.")]
Tools = Annotated[
    str | None, typer.Option("--tools", metavar="SETS", help="Offer only these sets of tools: plan,run,read.")
]
Run = Annotated[str, typer.Argument(help="The run's id, as 'toprope runs' shows it.")]
COMPONENTS = "keeper, policy, api, inference, trainer, environment or conductor"


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="toprope",
        help="Reinforcement learning of language models, planned by an agent, held by its owner. Runs and drafts lie "
        "in TOPROPE_HOME, settings and locks in TOPROPE_CONFIG; 'toprope clients' shows where that is.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
    ) -> None:
        if version:
            typer.echo(f"toprope {toprope.__version__}")
            raise typer.Exit()

    watching = (runs, status, watch, logs, report)
    for command in (serve, token, *watching, stop, resume, doctor, prune, install, clients, demo):
        app.command()(command)
    from toprope_server.cli.data_commands import build as data
    from toprope_server.cli.env.commands import build as environments

    app.add_typer(environments())
    app.add_typer(data())
    return app


def serve(
    http: Annotated[bool, typer.Option("--http", help="Serve over HTTP instead, until Ctrl-C.")] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="With --http: the port; 0 for any free one. Default: http.port, or 8765."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="With --http: the address. Others than loopback only if http.hosts of the settings has it."),
    ] = None,
    read_only: ReadOnly = False,
    tools: Tools = None,
) -> None:
    """Serve MCP on standard input and output, for a client that started this, or over HTTP with a token."""
    with _errors():
        role = Role.of(read_only, tools)
    if not http:
        if port is not None or host is not None:
            raise typer.BadParameter("--port and --host are of --http; without it MCP is served on standard input.")
        from toprope_server.mcp.app import serve_stdio

        serve_stdio(role)
    with _errors():
        from toprope_server.http.app import serve_http

        serve_http(host or "127.0.0.1", port, role=role)


def token(
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a new one; the old one is refused at once.")] = False,
) -> None:
    """Print the token that clients of 'serve --http' must send; made at its first use."""
    with _errors():
        from toprope.settings.owner import Home
        from toprope_server.http.token import TokenFile

        file = TokenFile(Home.locate().configuration)
        typer.echo(file.rotate() if rotate else file.ensure())


def runs() -> None:
    """List all runs, newest first."""
    with _workshop() as workshop:
        from toprope_tools.status.status import run_row

        found = workshop.statuses()
        for run in found:
            typer.echo(run_row(run))
        if not found:
            typer.echo(f"There are no runs in {workshop.home.runs}.")


def status(run: Run) -> None:
    """Show how a run stands now."""
    with _workshop() as workshop:
        from toprope_tools.status.status import numbers_line

        found = workshop.runs.status(run)
        typer.echo(f"{found.run_id}: {found.state}{f' ({found.reason})' if found.reason else ''}")
        typer.echo(numbers_line(found.progress))
        for name, member in found.crew.items():
            typer.echo(f"  {name}: {member.state}{f', pid {member.pid}' if member.pid else ''}")
        for finding in found.findings:
            typer.echo(f"{finding.level}: {finding.rule}: {finding.what} {finding.next}".rstrip())
        if found.failure is not None:
            typer.echo(f"failed: {found.failure.component}: {found.failure.reason} {found.failure.hint}".rstrip())
            for line in found.failure.excerpt:
                typer.echo(f"  {line}")


def watch(
    run: Annotated[list[str] | None, typer.Argument(help="Ids of runs; all that are live when none is named.")] = None,
) -> None:
    """Follow runs live until they have ended. In a pipe: one line for each change.

    Exit status 1 if one of them failed or was lost.
    """
    with _workshop() as workshop:
        from toprope_server.cli.runs.watch import watch as follow

        raise typer.Exit(follow(workshop, run or []))


def logs(
    run: Run,
    component: Annotated[str | None, typer.Argument(help=f"{COMPONENTS}; with --follow, all when left out.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=200, help="Lines from the end.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added, until the run ends.")
    ] = False,
) -> None:
    """Show the end of a component's log, or follow it."""
    with _workshop() as workshop:
        if follow:
            from toprope_server.cli.runs.follow import follow as go_on

            go_on(workshop, run, component, lines)
            return
        from toprope_tools.runs.logs import read_logs

        if component is None:
            raise typer.BadParameter(f"Name a component: {COMPONENTS}. With --follow all are shown.")
        _say(lambda: read_logs(workshop, run_id=run, component=component, lines=lines), last=False)


def stop(run: Run) -> None:
    """Stop a run; a training run writes a last checkpoint."""
    with _workshop() as workshop:
        from toprope_tools.runs.training import stop_training

        _say(lambda: stop_training(workshop, run_id=run))


def resume(run: Run) -> None:
    """Go on with a run that was stopped, failed or was lost, from its last checkpoint."""
    with _workshop() as workshop:
        from toprope_tools.runs.training import resume_training

        _say(lambda: resume_training(workshop, run_id=run))


def report(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Where to: .html for one file, .md for Markdown with its pictures beside."),
    ],
    run: Annotated[str | None, typer.Argument(help="The run's id, as 'toprope runs' shows it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all runs and the ledger of experiments.")] = False,
) -> None:
    """Write a report to read, keep or send on: of one run, or of everything."""
    if (run is None) != everything:
        raise typer.BadParameter("Name a run, or give --all.")
    with _workshop() as workshop:
        from toprope_server.cli.runs.report import write_report

        for path in write_report(workshop, run, output):
            typer.echo(f"Wrote {path}")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Make a damaged index of drafts anew; the old file is kept.")
    ] = False,
) -> None:
    """Look for what is broken or missing on this machine, and say how to mend it. Changes nothing without --repair.

    Exit status 1 if something is broken.
    """
    if repair:
        with _errors():
            from toprope_server.cli.doctor.repair import main as mend

            raise typer.Exit(mend())
    with _errors():
        from toprope_server.cli.doctor.doctor import main

        raise typer.Exit(main(as_json))


def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Runs that ended longer ago: 12h, 30d, 8w. Default: 30d.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Spare this many of the newest runs.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it this only shows what would go.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go, which is the default.")] = False,
) -> None:
    """Delete old runs with their checkpoints, and what crashes left over. Live runs never."""
    if yes and dry_run:
        raise typer.BadParameter("--yes deletes and --dry-run does not: give one of them.")
    with _workshop() as workshop:
        from toprope_server.cli.runs.prune import main

        raise typer.Exit(main(workshop, older_than=older_than, keep=keep, delete=yes))


def install(
    client: Annotated[str, typer.Argument(help="claude-desktop, claude-code or inspector.")],
    show: Annotated[bool, typer.Option("--print", help="Print what would be written, and write nothing.")] = False,
    http: Annotated[
        bool, typer.Option("--http", help="For 'serve --http', instead of a server that the client starts.")
    ] = False,
    project: Annotated[
        Path | None, typer.Option(help="claude-code: into .mcp.json of this folder instead of the user's own file.")
    ] = None,
    read_only: ReadOnly = False,
    tools: Tools = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Keep this variable of the current environment in the owner's settings.yaml, for the component that "
            "needs it: clients do not pass it on. COMPONENT:NAME names the component. Can be repeated.",
        ),
    ] = None,
) -> None:
    """Enter this installation into a client's configuration, beside what is there; the old file is backed up."""
    with _errors():
        from toprope_server.cli.install import main

        role = Role.of(read_only, tools)
        for line in main(client, show=show, http=http, project=project, variables=variable or [], role=role):
            typer.echo(line)


def clients() -> None:
    """Print what to paste into Claude Desktop, Claude Code and MCP Inspector to use this installation."""
    from toprope.settings.owner import Home

    home = Home.locate()
    typer.echo("\n".join(client_lines()))
    typer.echo(f"\nRuns and drafts are kept in {home.path}; settings and locks are read from {home.configuration}.")


def demo() -> None:
    """Train a tiny policy end to end, as an agent would do it; about two minutes, no GPU, key or network."""
    from toprope_server.cli.demo import main

    raise typer.Exit(main())


@contextmanager
def _errors() -> Iterator[None]:
    """Our own errors end the command with their text and exit code 1."""
    try:
        yield
    except TopropeError as error:
        typer.echo(f"toprope: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of a pipe has what it wanted
        sys.stderr.close()
        raise typer.Exit(141) from None


@contextmanager
def _workshop() -> Iterator[Workshop]:
    """The owner's workshop. See `_errors`."""
    with _errors():
        from toprope_tools.workshop import Workshop

        yield Workshop.open()


open_workshop = _workshop
"""For groups of commands in modules of their own."""


def _say(work: Callable[[], Any], last: bool = True) -> None:
    """Prints a tool's answer; without its last line, which is an agent's next call, where `last` is True."""

    async def run() -> Answer:
        return await work()

    lines = anyio.run(run).text.split("\n")
    typer.echo("\n".join(lines[:-1] if last and len(lines) > 1 else lines))
