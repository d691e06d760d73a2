"""From names to orders for data: which runs, data sets, files, models and environments an agent or a person means, what
the owner allows of it, and which keys the program needs."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from toprope.errors import DiskFull, InvalidValue, LockedField, NotFound, NotPossibleNow, shown
from toprope.records.run.folder import RunFolder
from toprope.records.run.tested_models import ENDPOINT_KEY
from toprope.settings.owner import Home, OwnerSettings
from toprope.trajectories.capture.selection import Query
from toprope.trajectories.capture.strategy import OwnCode
from toprope.trajectories.datasets.store import NAME, DatasetStore, check_name
from toprope.trajectories.datasets.trace_inbox import Inbox
from toprope.trajectories.datasets.writers import ENDINGS, FORMATS
from toprope.trajectories.jobs.jobs import Job
from toprope.trajectories.jobs.orders import Code, Order
from toprope.trajectories.synthesis.recipe import Recipe, parse_recipe
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.endpoints import keys_for, require_keys, resolve_models
from toprope.workbench.launch.seeds import expand

__all__ = [
    "INBOX",
    "DataOrder",
    "Sources",
    "begin",
    "build_order",
    "export_order",
    "inbox_of",
    "job_of",
    "live_jobs",
    "sources_of",
]

INBOX = "inbox"
"""`name@inbox`: what was posted for a data set from outside."""
_FLOOR = 256_000_000
_SHARE = 0.6
"""Bytes of an export for each of a journal, about: a journal has tokens and log-probabilities instead of words."""
_KEPT_S = 7 * 86_400.0


@dataclass(frozen=True)
class Sources:
    """What is read."""

    runs: list[Path] = field(default_factory=list)
    versions: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class DataOrder:
    """An order, and the variables with keys that its program needs and no file holds."""

    order: Order
    keys: dict[str, str] = field(default_factory=dict)


def sources_of(home: Home, names: Sequence[str]) -> Sources:
    """What names mean: runs, seed groups (all of their runs), data sets (`name@v2`), and inboxes (`name@inbox`).
    What is named twice, as a run and by its group for instance, is read once.

    Raises:
        NotFound: One is nothing of these.
    """
    found, store = Sources(), DatasetStore(home.datasets)
    for name in dict.fromkeys(names):
        base, at, version = name.partition("@")
        if at and version == INBOX:
            if not NAME.fullmatch(base) or not store.inbox(base).is_file():
                raise NotFound(f"Nothing was posted for {shown(base)}.", hint="docs/data.md says how traces come in.")
            found.files.append(store.inbox(base))
        elif at:
            found.versions.append(store.find(name).path)
        else:
            found.runs.extend(_run(home, run_id, store) for run_id in expand(home.runs, [name]))
    return Sources(*(list(dict.fromkeys(paths)) for paths in (found.runs, found.versions, found.files)))


def _run(home: Home, name: str, store: DatasetStore) -> Path:
    try:
        return RunFolder.open(home.runs, name).path
    except NotFound:
        if store.versions(name) if NAME.fullmatch(name) else ():
            raise NotFound(f"{name} is a data set, not a run.", hint=f"Name a version: {name}@v1.") from None
        raise


def export_order(
    home: Home, names: Sequence[str], form: str, where: Mapping[str, Any] | None, *, target: Path | None = None
) -> DataOrder:
    """The order of an export.

    Args:
        home: The owner's.
        names: See `sources_of`.
        form: One of FORMATS.
        where: Filters, see `Query`.
        target: Where to; in the home's folder of exports when None.

    Raises:
        LockedField: The owner forbids it.
        NotFound, InvalidValue: A name, filter or format is none.
    """
    settings = home.settings()
    if not settings.data.export:
        raise LockedField("The owner does not allow exports (data.export in settings.yaml).", hint="Ask the owner.")
    if form not in FORMATS:
        raise InvalidValue(f"There is no format {shown(form)}.", hint=f"Formats: {', '.join(FORMATS)}.")
    if not names:
        raise InvalidValue("No run is named.", hint="list_runs names the runs there are.")
    query, sources = Query.of(where), sources_of(home, names)
    order = Order(
        kind="export",
        runs=[str(path) for path in sources.runs],
        versions=[str(path) for path in sources.versions],
        files=[str(path) for path in sources.files],
        where=query.asked(),
        form=form,
        most_items=settings.data.max_items,
    )
    if target is None:
        digest = hashlib.sha256(order.model_dump_json().encode()).hexdigest()[:8]
        stem = names[0].replace("@", "-") if len(names) == 1 else f"{len(names)}-sources"
        target = home.exports / f"{stem}-{digest}{ENDINGS[form]}"
    order.target = str(target)
    _require_room(sources, target)
    return DataOrder(order)


def inbox_of(home: Home, name: str) -> Inbox:
    """Where traces from outside wait for a data set.

    Raises:
        LockedField: The owner forbids data sets.
        InvalidValue: The name is none.
    """
    _require_builds(home.settings())
    return Inbox(home.ensure().datasets, name)


def _require_builds(settings: OwnerSettings) -> None:
    if not settings.data.build:
        raise LockedField("The owner does not allow data sets (data.build in settings.yaml).", hint="Ask the owner.")


def build_order(
    home: Home,
    catalog: Catalog,
    name: str,
    names: Sequence[str],
    where: Mapping[str, Any] | None,
    recipe: Mapping[str, Any] | None,
    *,
    anywhere: bool = False,
    files: Sequence[Path] = (),
) -> DataOrder:
    """The order of a build.

    Args:
        home: The owner's.
        catalog: The environments there are.
        name: The data set's.
        names: What is read, see `sources_of`.
        where: Filters.
        recipe: See `toprope.trajectories.synthesis.recipe`.
        anywhere: Whether users' files may lie anywhere: the owner asks.
        files: Files of JSON lines to read besides.

    Raises:
        LockedField: The owner forbids it.
        NotFound, InvalidValue: Something is named that is not there, or does not fit together.
    """
    settings = home.settings()
    _require_builds(settings)
    check_name(name)
    plan, query = parse_recipe(recipe), Query.of(where)
    if not names and not files and not plan.generates:
        raise InvalidValue(
            "There is nothing to make a data set of: no sources, and no step that generates.",
            hint="Name runs or data sets as sources, or give the recipe a step with templates or an environment.",
        )
    sources = sources_of(home, names)
    order = Order(
        kind="build",
        runs=[str(path) for path in sources.runs],
        versions=[str(path) for path in sources.versions],
        files=[str(path) for path in [*sources.files, *files]],
        where=query.asked(),
        store=str(home.datasets),
        name=name,
        recipe=plan.model_dump(mode="json", exclude_defaults=True),
        most_items=settings.data.max_items,
    )
    keys = _fill(order, plan, home, settings, catalog, anywhere)
    _require_room(sources, home.datasets / name)
    return DataOrder(order, keys)


def _fill(
    order: Order, plan: Recipe, home: Home, settings: OwnerSettings, catalog: Catalog, anywhere: bool
) -> dict[str, str]:
    """Puts into an order what its recipe names; returns the keys of its teachers."""
    folders = home.strategy_folders(settings)

    def near(name: str) -> Path | None:
        given = Path(name).expanduser()
        if anywhere and given.is_file():
            return given.resolve()
        if given.name != name:  # no path: a name in one of the owner's folders
            return None
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def code(written: str, arguments: dict[str, Any]) -> Code:
        found = OwnCode.parse(written, near)
        return Code(file=str(found.file), attribute=found.attribute, arguments=arguments)

    if plan.strategy is not None:
        order.strategy = code(plan.strategy, plan.strategy_arguments)
    keys: dict[str, str] = {}
    for number, step in enumerate(plan.steps, 1):
        written = step.generate or step.filter or (step.score if step.score != "environment" else None)
        if written is not None:
            order.codes[str(number)] = code(written, step.arguments)
        if step.teacher is not None:
            models = resolve_models([step.teacher], settings, home.preset_folders)
            if len(models) != 1 or models[0].endpoint is None:
                raise InvalidValue(f"Step {number}: {shown(step.teacher)} is no single model at an endpoint.")
            require_keys(models, settings, home.settings_file)
            order.teachers[step.teacher] = models[0].endpoint
            keys |= {f"{ENDPOINT_KEY}{one}": key for one, key in keys_for(models, settings).items()}
        if step.environment is not None:
            entry = catalog.find(step.environment)
            if entry.status != "ready":
                raise InvalidValue(f"Step {number}: {entry.name} is {entry.status}: {entry.problem}")
            order.environments[step.environment] = entry.environment
            locks = home.locks()
            order.locks, order.network = locks.record(), not locks.refusal("environment.network", "allow")
    return keys


def _require_room(sources: Sources, target: Path) -> None:
    size = sum(segment.stat().st_size for run in sources.runs for segment in (run / "journal").glob("*.journal")) + sum(
        path.stat().st_size for version in sources.versions for path in version.iterdir()
    )
    place = next(one for one in (target, *target.parents) if one.exists())
    free, need = shutil.disk_usage(place).free, _FLOOR + round(size * _SHARE)
    if free < need:
        raise DiskFull(
            f"{place} has {free / 1e9:.1f} GB left, and this may take {need / 1e9:.1f} GB. Nothing was written.",
            hint="Make room, or name fewer runs.",
        )


def _places(home: Home) -> tuple[Path, Path]:
    return home.exports / ".jobs", home.datasets / ".jobs"


def job_of(home: Home, order: Order) -> Job:
    """The job of an order: the same for the same order."""
    exports, datasets = _places(home)
    return Job.of(exports if order.kind == "export" else datasets, order)


def live_jobs(home: Home) -> Iterator[Job]:
    """The jobs that go on."""
    for place in _places(home):
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            job = Job(folder)
            if job.alive() and not job.ended():  # one that has ended is on its way out
                yield job


def begin(home: Home, asked: DataOrder) -> Job:
    """Starts the program for an order, unless it runs or its result waits to be told.

    Raises:
        NotPossibleNow: As many run as the owner allows.
        ComponentFailed: It does not start.
    """
    job = job_of(home, asked.order)
    if job.alive() if not job.ended() else not job.told():
        return job
    most = home.settings().data.at_once
    with FileLock(str(home.path / "data.lock")):  # whoever is asked beside us counts ours
        live = list(live_jobs(home))
        if len(live) >= most:
            raise NotPossibleNow(
                f"{len(live)} exports and builds are going on, as many as the owner allows (data.at_once).",
                hint="Wait for them to end; nothing was started.",
            )
        _forget(home)
        job.begin(asked.order, asked.keys)
    return job


def _forget(home: Home) -> None:
    """Removes what jobs left that were told long ago."""
    for place in _places(home):
        for folder in place.iterdir() if place.is_dir() else ():
            told = folder / "told"
            if told.exists() and time.time() - told.stat().st_mtime > _KEPT_S and not Job(folder).alive():
                shutil.rmtree(folder, ignore_errors=True)
