"""The catalog of environments.

Listing reads files and runs no user code, so it is fast and safe. It is repeated for each request, because authors edit
files meanwhile. Each kind of place is a source (`toprope.workbench.sources`); a source that fails does not hide the
others. A worker answers what files cannot tell (`toprope.workbench.catalog.describe`).
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toprope.errors import NotFound, TopropeError, shown, visible
from toprope.records.run.specification import EnvironmentSource
from toprope.settings.owner import Home
from toprope.shipped import ENVIRONMENTS
from toprope.workbench.adapters import Adapter, adapters
from toprope.workbench.catalog.describe import Describer, Description, Example, WorkerOptions
from toprope.workbench.catalog.search import search
from toprope.workbench.entries import Entry, Names, Source, broken
from toprope.workbench.interpreters.known import Known, known_interpreters
from toprope.workbench.interpreters.registry import Added, Registry
from toprope.workbench.sources.datasets import DatasetSource
from toprope.workbench.sources.folders import FileReader, FolderSource, own_folders
from toprope.workbench.sources.installed import InstalledSource
from toprope.workbench.sources.orchestrator import OrchestratorSource
from toprope.workbench.sources.reasoning_gym import ReasoningGymSource
from toprope.workbench.sources.registered import RegisteredSource
from toprope.workbench.sources.subfolders import SubfolderSource
from toprope.workbench.sources.targets import TargetSource

__all__ = ["Catalog", "Description", "Entry", "Example"]

_LONGEST_NAME = 100


class Catalog:
    """The environments of all sources.

    Args:
        folders: The owner's folders, searched in order after the shipped one, with the folders in them; missing
            folders count as empty.
        datasets: Folders whose files the environments `dataset` and `orchestrator` may read.
        tools: The owner's tools by name, see `LentTool.declaration`.
        registry: Environments and interpreters that the owner added; None for none.
    """

    def __init__(
        self,
        folders: Iterable[Path] = (),
        *,
        datasets: Iterable[Path] = (),
        tools: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
    ) -> None:
        own_places = self._own = own_folders(folders, ENVIRONMENTS)
        data = [Path(folder).expanduser().absolute() for folder in datasets]
        self._registry = registry
        self._adapters_found: list[Adapter] | None = None
        self._describer = Describer(ENVIRONMENTS)
        reader = self._reader = FileReader(self._adapters)
        self._sources: list[Source] = [
            FolderSource(ENVIRONMENTS, "shipped", reader, self.interpreters),
            *(FolderSource(folder, "folder", reader, self.interpreters) for folder in own_places),
            DatasetSource(own_places, data),
            TargetSource(own_places, self._adapters, self.interpreters),
            OrchestratorSource(data, tools or {}),
            RegisteredSource(self._added, self._adapters, self.interpreters, reader),
            SubfolderSource(own_places, reader, self.interpreters, self._separate_places),
            ReasoningGymSource(self.interpreters),
            InstalledSource(self._adapters, self.interpreters),
        ]

    @classmethod
    def of_home(cls, home: Home) -> Catalog:
        """Return the catalog under the owner's present settings."""
        settings = home.settings()
        return cls(
            home.environment_folders(settings),
            datasets=home.dataset_folders(settings),
            tools=home.lent_tools(settings),
            registry=Registry(home.environments_file),
        )

    def entries(self) -> list[Entry]:
        """Return all environments: shipped, the owner's files, data sets, added ones, files in the owner's subfolders,
        then packages by ecosystem.

        Changed files are read again. Files in subfolders get the names that no other source has.
        """
        by_source: dict[Source, list[Entry]] = {}
        names = Names()
        for source in sorted(self._sources, key=lambda candidate: isinstance(candidate, SubfolderSource)):
            try:
                by_source[source] = source.entries(names)
            except Exception as error:  # A broken source must not hide the others.
                problem = f"This source cannot be listed: {type(error).__name__}: {error}"
                by_source[source] = [broken(source.kind, problem, source.kind)]
        return [_clean(entry) for source in self._sources for entry in by_source[source]]

    def search(self, query: str = "") -> list[Entry]:
        """Return the entries that a query finds, all of them if it is empty. See `search.search`."""
        return search(self.entries(), query)

    def find(self, name: str) -> Entry:
        """Return the environment of this name.

        Raises:
            NotFound: Unknown name; the message names the three nearest.
        """
        entries = self.entries()
        matches = [entry for entry in entries if entry.name == name]
        if matches:
            return next((entry for entry in matches if entry.usable), matches[0])
        close = _nearest(name, [entry.name for entry in entries])
        hint = f"The nearest: {', '.join(close)}." if close else ""
        raise NotFound(f"There is no environment {shown(name)}.", hint=f"{hint} list_environments shows all.".strip())

    def of_source(self, source: EnvironmentSource) -> Entry:
        """Return the environment that a draft has, with the draft's source: by its name, or by its file and class if
        another class in the file has changed the name.

        Raises: As `find`.
        """
        try:
            entry = self.find(source.name)
        except NotFound:
            same = [entry for entry in self.entries() if source.file and _place(entry.environment) == _place(source)]
            if not same:
                raise
            entry = replace(same[0], name=source.name)
        return replace(entry, environment=source)

    def lent(self, name: str) -> Entry:
        """Return an environment whose target holds what the owner lends, without listing packages if files tell it.

        Raises: As `find`.
        """
        for source in self._sources:
            if isinstance(source, DatasetSource | OrchestratorSource):
                for entry in source.entries(Names()):
                    if entry.name == name:
                        return entry
        return self.find(name)

    async def describe(self, entry: Entry, options: WorkerOptions | None = None, *, examples: int = 3) -> Description:
        """Describe an environment in a worker: see `Describer.describe`."""
        return await self._describer.describe(entry, options or WorkerOptions(), examples=examples)

    def interpreters(self) -> list[Known]:
        """Return every interpreter that may have environments, Toprope's own first."""
        try:
            return known_interpreters(self._added())
        except TopropeError:  # The source `registered` reports the broken file.
            return known_interpreters({})

    def in_file(self, file: Path) -> FolderSource:
        """Return the environments in a file at any path."""
        return FolderSource(file, "file", self._reader, self.interpreters)

    def _separate_places(self) -> set[Path]:
        """Return the folders and files that have a source of their own, without links in their paths."""
        places = [str(place) for place in (*self._own, ENVIRONMENTS)]
        with contextlib.suppress(TopropeError):  # The source `registered` reports the broken file.
            # A project's path is what was given.
            places += [addition.path or addition.given for addition in self._added().values()]
        return {Path(os.path.realpath(place)) for place in places if os.path.isabs(place)}

    def _added(self) -> dict[str, Added]:
        return self._registry.read() if self._registry is not None else {}

    def _adapters(self) -> list[Adapter]:
        if self._adapters_found is None:
            self._adapters_found = adapters()
        return self._adapters_found


def _place(source: EnvironmentSource) -> tuple[str | None, str | None]:
    return source.file, source.attribute


def _clean(entry: Entry) -> Entry:
    """Clean an entry for display: file names and package texts are untrusted."""
    name, description, problem = _line(entry.name, 160), _line(entry.description, 1000), _line(entry.problem, 1000)
    if (name, description, problem) == (entry.name, entry.description, entry.problem):
        return entry
    environment = entry.environment.model_copy(update={"name": _line(entry.environment.name, 160)})
    return replace(entry, name=name, description=description, problem=problem, environment=environment)


def _line(text: str, longest: int) -> str:
    return text if text.isprintable() and len(text) <= longest else visible(" ".join(text.split()), longest)


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return up to three nearest names, compared with and without the part before the slash."""
    wanted = name[:_LONGEST_NAME].casefold()  # The comparison takes time proportional to the length.

    def likeness(candidate: str) -> float:
        return max(
            difflib.SequenceMatcher(None, wanted, form).ratio() for form in (candidate, candidate.rpartition("/")[2])
        )

    ranked = sorted(((likeness(candidate), candidate) for candidate in names), key=lambda pair: -pair[0])
    return [candidate for ratio, candidate in ranked[:3] if ratio >= 0.4]
