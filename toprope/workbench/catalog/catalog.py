"""Which environments there are, and what one of them is like.

Listing reads files and runs nothing, so it is quick and cannot be disturbed; it is done anew at each question, because
an author edits files while an agent watches. Each kind of place is a source with a file of its own
(`toprope.workbench.sources`), and one that cannot be listed hides no other. What files cannot tell is asked of a worker
(`toprope.workbench.catalog.describe`): user code never runs here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toprope.errors import NotFound, TopropeError, shown, visible
from toprope.shipped import ENVIRONMENTS
from toprope.workbench.adapters import Adapter, adapters
from toprope.workbench.catalog.describe import Describer, Description, Example
from toprope.workbench.entries import Entry, Names, Source, broken
from toprope.workbench.interpreters.known import Known, known_interpreters
from toprope.workbench.interpreters.registry import Added, Registry
from toprope.workbench.sources.datasets import DatasetSource
from toprope.workbench.sources.folders import FileReader, FolderSource, own_folders
from toprope.workbench.sources.installed import InstalledSource
from toprope.workbench.sources.orchestrator import OrchestratorSource
from toprope.workbench.sources.reasoning_gym import ReasoningGymSource
from toprope.workbench.sources.registered import RegisteredSource
from toprope.workbench.sources.targets import TargetSource

__all__ = ["Catalog", "Description", "Entry", "Example", "shipped_folder"]

_LONGEST_NAME = 100


def shipped_folder() -> Path:
    """The folder with the environments that ship with us: it lies beside the package."""
    return ENVIRONMENTS


class Catalog:
    """The environments of all sources.

    Args:
        folders: The owner's folders, searched in this order after our own. One that does not exist is empty.
        shipped: Our folder.
        datasets: Folders whose files the environments `dataset` and `orchestrator` may read.
        tools: The owner's tools by name, as `LentTool.declaration` says them.
        registry: What the owner added, interpreters too; None: nothing.
    """

    def __init__(
        self,
        folders: Iterable[Path] = (),
        *,
        shipped: Path | None = None,
        datasets: Iterable[Path] = (),
        tools: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
    ) -> None:
        shipped = shipped or shipped_folder()
        own = own_folders(folders, shipped)
        data = [Path(folder).expanduser().absolute() for folder in datasets]
        self._registry = registry
        self._adapters_found: list[Adapter] | None = None
        self._describer = Describer(shipped)
        reader = self._reader = FileReader(self._adapters)
        self._sources: list[Source] = [
            FolderSource(shipped, "shipped", reader, self.interpreters),
            *(FolderSource(folder, "folder", reader, self.interpreters) for folder in own),
            DatasetSource(own, data),
            TargetSource(own, self._adapters, self.interpreters),
            OrchestratorSource(data, tools or {}),
            RegisteredSource(self._added, self._adapters, self.interpreters, reader),
            ReasoningGymSource(self.interpreters),
            InstalledSource(self._adapters, self.interpreters),
        ]

    def entries(self) -> list[Entry]:
        """All environments: ours, the owner's by folder and file, data sets, what was added, then those of packages by
        ecosystem. Files are read again when they changed."""
        entries: list[Entry] = []
        names = Names()
        for source in self._sources:
            try:
                entries += source.entries(names)
            except Exception as error:  # whatever one place holds, the others are listed
                problem = f"This source cannot be listed: {type(error).__name__}: {error}"
                entries.append(broken(source.kind, problem, source.kind))
        return [_sayable(entry) for entry in entries]

    def search(self, query: str = "") -> list[Entry]:
        """Entries whose name, description, ecosystem or tags contain every word of a query; those that match by name
        first."""
        words = query.casefold().split()
        entries = self.entries()

        def missing_from_name(entry: Entry) -> int:
            return sum(word not in entry.name.casefold() for word in words)

        found = [entry for entry in entries if all(word in _text(entry) for word in words)]
        return sorted(found, key=missing_from_name)

    def find(self, name: str) -> Entry:
        """The environment of that name.

        Raises:
            NotFound: There is none; the message names the three nearest.
        """
        entries = self.entries()
        named = [entry for entry in entries if entry.name == name]
        if named:
            return next((entry for entry in named if entry.usable), named[0])
        close = _nearest(name, [entry.name for entry in entries])
        hint = f"The nearest: {', '.join(close)}." if close else ""
        raise NotFound(f"There is no environment {shown(name)}.", hint=f"{hint} list_environments shows all.".strip())

    async def describe(self, entry: Entry, knobs: Mapping[str, Any] | None = None, **asked: Any) -> Description:
        """Asks a worker what an environment is like: see `Describer.describe`."""
        return await self._describer.describe(entry, knobs, **asked)

    def interpreters(self) -> list[Known]:
        """Every interpreter in which environments may be found, ours first."""
        try:
            return known_interpreters(self._added())
        except TopropeError:  # `registered` says what is wrong with the file
            return known_interpreters({})

    def in_file(self, file: Path) -> FolderSource:
        """The environments of one file, wherever it lies."""
        return FolderSource(file, "file", self._reader, self.interpreters)

    def _added(self) -> dict[str, Added]:
        return self._registry.read() if self._registry is not None else {}

    def _adapters(self) -> list[Adapter]:
        if self._adapters_found is None:
            self._adapters_found = adapters()
        return self._adapters_found


def _sayable(entry: Entry) -> Entry:
    """The entry as it can be shown: file names and what somebody's package says of itself may hold anything."""
    name, description, problem = _line(entry.name, 160), _line(entry.description, 1000), _line(entry.problem, 1000)
    if (name, description, problem) == (entry.name, entry.description, entry.problem):
        return entry
    environment = entry.environment.model_copy(update={"name": _line(entry.environment.name, 160)})
    return replace(entry, name=name, description=description, problem=problem, environment=environment)


def _line(text: str, longest: int) -> str:
    return text if text.isprintable() and len(text) <= longest else visible(" ".join(text.split()), longest)


def _text(entry: Entry) -> str:
    return " ".join([entry.name, entry.description, entry.source, entry.ecosystem, *entry.tags]).casefold()


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Up to three names, compared whole and without what comes before the slash."""
    wanted = name[:_LONGEST_NAME].casefold()  # the comparison takes time by length

    def likeness(candidate: str) -> float:
        return max(
            difflib.SequenceMatcher(None, wanted, form).ratio() for form in (candidate, candidate.rpartition("/")[2])
        )

    ranked = sorted(((likeness(candidate), candidate) for candidate in names), key=lambda pair: -pair[0])
    return [candidate for ratio, candidate in ranked[:3] if ratio >= 0.4]
