"""Shared by the commands: report errors, open the owner's workshop, and name the program."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toprope.errors import TopropeError

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print an error of ours, its next step as a command, and end the command with exit status 1."""
    try:
        yield
    except TopropeError as error:
        tell(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of the pipe has seen enough
        sys.stderr.close()
        raise typer.Exit(141) from None


def tell(error: TopropeError) -> None:
    """Print an error of ours and, on a line of its own, its next step as a command."""
    from toprope_server.cli.wording import in_commands

    lines = "\n".join(filter(None, (error.message, error.hint)))
    typer.echo(f"toprope: {in_commands(lines)}", err=True)


@contextmanager
def showing_work(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's standard error that a command works; a pipe or a log gets nothing.

    Yields:
        A function that changes the text.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


def warn_of_settings(workshop: Workshop) -> None:
    """Say that the owner's settings are invalid, in a command that works without them."""
    try:
        workshop.settings()
    except TopropeError as error:
        typer.echo(f"toprope: the settings are invalid, but this works without them. {error}", err=True)


@contextmanager
def open_workshop() -> Iterator[Workshop]:
    """Open the owner's workshop; errors are reported as in `reporting_errors`."""
    with reporting_errors():
        from toprope_tools.workshop import Workshop

        yield Workshop.open()


def program() -> str:
    """This installation's `toprope` for a shell: its path, unless the shell finds it by name."""
    script = Path(sys.executable).with_name("toprope")
    if not script.exists():
        return shlex.join([sys.executable, "-P", "-m", "toprope_server.cli"])
    found = shutil.which("toprope")
    return "toprope" if found is not None and script.samefile(found) else shlex.quote(str(script))
