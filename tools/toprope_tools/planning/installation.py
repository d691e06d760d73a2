"""Tool that installs an ecosystem or a package for environments, if the owner lets agents install.

An agent may name ecosystems and plain requirements, of which only wheels are installed. Only the owner may name paths,
URLs and repositories, because installing one runs its author's code, as building a source distribution does.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from toprope.errors import InvalidValue, NotPossibleNow
from toprope.text_format import call, clip, plural
from toprope.untrusted import marked, named
from toprope.workbench.entries import Entry
from toprope.workbench.interpreters.adding import Interpreters, Order, Outcome
from toprope.workbench.interpreters.installing import Wanted
from toprope.workbench.sources.targets import defining_files
from toprope_tools.answers.answer import Answer
from toprope_tools.answers.planning import Installed
from toprope_tools.clients import UNKNOWN, Client, longest_wait_s

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._ -]+\])?\s*([<>=!~]=?[^@;/\s]+)?")
_LOOK_S = 1.0
_NAMED = 6
"""Environments that the answer names."""


async def add_environment(
    workshop: Workshop,
    *,
    what: str,
    progress: Callable[[float, float | None, str | None], Awaitable[Any]] | None = None,
    client: Client = UNKNOWN,
) -> Answer:
    """Make an interpreter for an ecosystem or a package, and count the environments that it adds.

    Args:
        what: An ecosystem's name, or a plain requirement.
        progress: Called with news during the installation.
        client: The caller.

    Raises:
        NotPossibleNow: The owner does not let agents install.
        InvalidValue: `what` is neither.
        TopropeError: The installation failed.
    """
    settings = workshop.settings()
    if settings.installs != "allow":
        raise NotPossibleNow(
            "The owner does not let agents install.", hint=f"Ask the owner to run: toprope env add {clip(what, 80)}"
        )
    if not _PLAIN.fullmatch(what.strip()):
        raise InvalidValue(
            f"{clip(what, 80)!r} is neither an ecosystem nor a plain requirement such as name==1.2.",
            hint="The owner adds paths, URLs and repositories: toprope env add ...",
        )
    order = Order(what.strip(), plain_only=True, wanted=Wanted((), wheels_only=True))
    installation = workshop.installations.of(order, Interpreters(workshop.home))
    deadline = time.monotonic() + longest_wait_s(client, settings.status.waits)
    reported_count = -1
    while not await to_thread.run_sync(installation.wait, _LOOK_S):
        if progress is not None and installation.count != reported_count:
            reported_count = installation.count
            await progress(float(reported_count), None, installation.news)
        if time.monotonic() > deadline:
            same_call = call("add_environment", what=order.given)
            news = marked(installation.news, 120)
            text = f"{order.given} is still being installed ({news}). To keep waiting: {same_call}"
            return Answer(text, Installed(name=order.given, done=False, news=clip(installation.news, 200)))
    workshop.installations.told(order)
    if installation.error is not None:
        raise installation.error
    assert installation.outcome is not None  # it ended without an error
    outcome = installation.outcome
    entries = await to_thread.run_sync(environments_of, workshop, outcome)
    interpreter = outcome.made
    data = Installed(
        name=outcome.added.name,
        done=True,
        packages=len(interpreter.pins) if interpreter is not None else 0,
        megabytes=round(interpreter.bytes / 1e6, 1) if interpreter is not None else 0.0,
        seconds=round(outcome.seconds, 1),
        environments=sum(entry.usable for entry in entries),
    )
    query = call("list_environments", query=outcome.added.adapter or outcome.added.name)
    return Answer(f"{describe_outcome(outcome, entries)}\nNext: {query}", data)


def environments_of(workshop: Workshop, outcome: Outcome) -> list[Entry]:
    """Return the catalog's entries that come from an installation, usable or not."""
    added = outcome.added
    entries = workshop.catalog.entries()
    if added.kind == "packages":
        if added.python is not None:
            return [entry for entry in entries if entry.environment.interpreter == added.python]
        return [entry for entry in entries if entry.ecosystem == added.adapter and entry.usable]
    place = added.path or ""
    sources = {entry.name: f"{entry.environment.file or ''}\n{entry.environment.target or ''}" for entry in entries}
    return [entry for entry in entries if entry.name == added.name or (bool(place) and place in sources[entry.name])]


def describe_outcome(outcome: Outcome, entries: Sequence[Entry]) -> str:
    """Describe the outcome of an installation in one or two lines.

    Args:
        entries: See `environments_of`.
    """
    added, interpreter = outcome.added, outcome.made
    if outcome.own and added.kind == "packages":
        text = f"{added.name}: Toprope's own interpreter already has it; nothing was installed."
    elif interpreter is not None:
        origin = "shares an existing interpreter" if outcome.shared else f"installed in {outcome.seconds:.0f} s"
        text = f"{added.name}: {origin}, {plural(len(interpreter.pins), 'package')}, {interpreter.bytes / 1e6:.0f} MB."
    elif added.python is not None:
        text = f"{added.name}: runs in {added.python}."
    else:
        text = f"{added.name}: added."
    usable = [entry.name for entry in entries if entry.usable]
    if usable:
        text += f" {plural(len(usable), 'environment')} to choose from: {', '.join(map(named, usable[:_NAMED]))}"
        text += ", ..." if len(usable) > _NAMED else "."
    if unusable := [entry for entry in entries if not entry.usable]:
        example = unusable[0]
        text += f" {len(unusable)} cannot be used, such as {named(example.name)}: {marked(example.problem, 300)}"
    if defined := _defining(added.path):
        text += (
            f" {plural(len(defined), 'YAML file')} there may open any file to an environment: add yours alone, "
            f"such as toprope env add {shlex.quote(str(defined[0].with_name(named(defined[0].name))))}."
        )
        if not entries:
            return text
    if entries:
        return text
    if added.adapter is not None and added.kind == "packages":
        return (
            f"{text} It contains no environments itself. Files in your folders that follow its conventions run in it; "
            f"toprope env add PACKAGE -r {added.adapter} adds packages of environments to it."
        )
    if below := _projects_below(added.path or added.given):
        place = shlex.quote(str(below[0].with_name(named(below[0].name))))
        return f"{text} It holds {plural(len(below), 'project')} to add one by one, such as toprope env add {place}."
    if added.kind == "packages" and Path(added.given).is_dir():
        return (
            f"{text} Neither its installed modules nor the files in its folder follow the conventions of an ecosystem "
            "(docs/ecosystems.md): ask its author how it is run, or describe it in a YAML file."
        )
    if added.kind == "packages":
        return (
            f"{text} None of its installed modules provides an environment: its author's packaging may leave them "
            "out. Add its folder of Python files instead, or ask its author."
        )
    return (
        f"{text} No file in it has a class derived from an environment of toprope.sdk or follows the conventions of "
        "an ecosystem (docs/ecosystems.md) so far; list_environments looks again at every call."
    )


def _projects_below(place: str) -> list[Path]:
    """Return the projects of a repository that has one for each of its environments."""
    if not Path(place).is_absolute():
        return []
    return sorted(file.parent for file in Path(place).glob("environments/*/pyproject.toml"))


def _defining(place: str | None) -> list[Path]:
    """Return the YAML files in an added folder that define environments."""
    return defining_files(Path(place)) if place and Path(place).is_dir() else []
